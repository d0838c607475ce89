"""How exact the logits of full shapes are: the worker's runner beside transformers in float32, with the same weights.

    OUT=/tmp/results PYTHONPATH=. python benchmarks/gpu_precision.py [--models llama-3.1-8b] [--more-kv-cache-dtypes]

Weights are random, with norms of 1 and a standard deviation of 0.02 (that of ``--load-format dummy``) or those of
``--deviations``; logits have one of ``0.02 * sqrt(hidden_size)`` then, 0.64 and 1.28. The larger it is, the more each
layer makes of the errors of those before. Prompts are prefilled in two steps, the second beside decode rows, and go on
greedily in graphs. The runner's projection to logits also copies them to a buffer, which graphs capture with it. The
reference then gets the same ids (no TF32, attention in plain operations). For scale, transformers computes in bfloat16
as well, and the runner with an 8-bit KV cache without scales.

An error is ``|a - b| / |b|`` over the vocabulary of one row. The command ends with status 1 if, with the KV cache of
the model's dtype, one is above 2e-2, or the argmax of a row is another one although the reference's two largest logits
differ by more than the row's largest error. With OUT set, OUT/precision.json holds every result.

Expected before the first run: errors of 4e-3 to 1e-2, below those of transformers in bfloat16, whose residual stream is
rounded in every layer; 3e-2 to 6e-2 with an 8-bit cache, which has 3 bits of mantissa.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu_worker.build import build_runner
from gpu_worker.loading.dummy_weights import DEVIATION, DummyWeights
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

SHAPES = pathlib.Path(__file__).parents[1] / "headrace" / "bench" / "shapes"
LENGTHS = (700, 420, 33, 250, 120, 1)
"""Of the prompts; the first three are prefilled in the first step."""
FIRST = 3
DECODES = 12
BLOCK_SIZE, MAX_MODEL_LEN = 16, 1024
LIMIT = 2e-2
SEED = 0
OWN, TRANSFORMERS = "headrace, KV auto", "transformers in bfloat16"


@dataclasses.dataclass
class Rows:
    """What a runner computed: for each slot its ids, and the logits that each id beyond the prompt was taken from."""

    ids: list[list[int]]
    logits: list[list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Precision:
    """Beside the reference; errors are relative to the norm of a row's logits."""

    rows: int
    logits_std: float
    largest_error: float
    mean_error: float
    mean_kl: float
    """Nats, of the reference's distributions from these."""
    same_argmax: int
    clear_rows: int
    """Rows whose two largest logits differ by more than the largest error of a logit."""
    clear_same_argmax: int

    @property
    def is_good(self) -> bool:
        return self.largest_error <= LIMIT and self.clear_same_argmax == self.clear_rows


def run_ours(model: pathlib.Path, device: str, deviation: float, kv_cache_dtype: str, lengths: Sequence[int]) -> Rows:
    """Prefill and decode with the worker's runner."""
    source = local_source(model, str(model))
    config = WorkerConfig(
        model=str(model),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_slots=len(lengths) + 2,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.9,
        kv_cache_bytes=2**30,
        num_blocks_override=1 + len(lengths) * (MAX_MODEL_LEN // BLOCK_SIZE),
        seed=SEED,
        batch_invariant=False,
        enforce_eager=False,
        load_format="dummy",
        kv_cache_dtype=kv_cache_dtype,
    )
    shape = load_model_config(source)
    runner: Any = build_runner(config, shape, DummyWeights(SEED, deviation), device)
    buffer = torch.zeros(len(lengths), shape.vocab_size, device=runner.device)
    project = runner.model.logits

    def kept(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = project(hidden)
        buffer[: len(logits)].copy_(logits[: len(buffer)])
        return logits

    runner.model.logits = kept
    if hasattr(runner, "use_cache"):
        # Graphs that were captured at the start know nothing of the buffer.
        runner.use_cache(runner.cache)
    draw = random.Random(1)
    prompts = [[draw.randrange(shape.vocab_size) for _ in range(length)] for length in lengths]
    rows = Rows([list(prompt) for prompt in prompts], [[] for _ in prompts])
    for step in make_steps(prompts):
        tokens = runner.launch(step).wait().tokens.tolist()
        for row, (slot, token) in enumerate(zip(step.sample[:, 1].tolist(), tokens, strict=True)):
            rows.ids[slot].append(token)
            rows.logits[slot].append(buffer[row].clone())
    return rows


def make_steps(prompts: list[list[int]]) -> list[Step]:
    """Two steps with prefills, then ``DECODES`` without."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    nothing, pairs = np.empty(0, np.int32), np.empty((0, 2), np.int32)
    blocks_of_a_slot = MAX_MODEL_LEN // BLOCK_SIZE
    steps = []
    for number, (prefilled, decoded) in enumerate(
        [(range(FIRST), range(0)), (range(FIRST, len(prompts)), range(FIRST))]
        + [(range(0), range(len(prompts)))] * DECODES
    ):
        news = [
            SlotInit(slot, str(slot), 0, len(prompts[slot]), len(prompts[slot]), 0, MAX_MODEL_LEN, params, [])
            for slot in prefilled
        ]
        blocks = [
            (slot, 1 + slot * blocks_of_a_slot + index)
            for slot in prefilled
            for index in range(-(-(len(prompts[slot]) + DECODES + 2) // BLOCK_SIZE))
        ]
        slots = [*prefilled, *decoded]
        steps.append(
            Step(
                epoch=Epoch(1, 1),
                number=number + 1,
                new=news,
                new_tokens=np.array([token for slot in prefilled for token in prompts[slot]], np.int32),
                prefill=np.array([(slot, 0, len(prompts[slot])) for slot in prefilled], np.int32).reshape(-1, 3),
                decode=np.array(decoded, np.int32),
                sample=np.array(list(enumerate(slots)), np.int32).reshape(-1, 2),
                blocks=np.array(blocks, np.int32).reshape(-1, 2),
                released=nothing,
                copies=pairs,
                transfers=np.empty((0, 3), np.int32),
            )
        )
    return steps


def reference_model(model: pathlib.Path, device: str, deviation: float) -> Any:
    """transformers' model in float32 with the same random weights, rounded to bfloat16 as ours are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.loads(model.read_text())
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = DummyWeights(SEED, deviation)
    weights.place(torch.bfloat16, torch.device(device))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weights.take(name, tuple(parameter.shape)))
    return made


def in_bfloat16(model: Any) -> Any:
    """The same model in bfloat16; the frequencies of the rotary embedding stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]
    return model


@torch.inference_mode()
def run_reference(model: Any, rows: Rows) -> list[torch.Tensor]:
    """For each slot [tokens, vocabulary] float32: logits at the places of ``rows.logits``."""
    found = []
    for ids, logits in zip(rows.ids, rows.logits, strict=True):
        known = torch.tensor([ids[:-1]], device=next(model.parameters()).device)
        found.append(model(known, logits_to_keep=len(logits)).logits[0].float())
    return found


def compare(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> Precision:
    a, b = torch.cat(ours), torch.cat(reference)
    errors = (a - b).norm(dim=1) / b.norm(dim=1)
    largest = b.topk(2).values
    is_clear = largest[:, 0] - largest[:, 1] > (a - b).abs().amax(1)
    is_same = a.argmax(1) == b.argmax(1)
    log_b = b.log_softmax(1)
    divergence = (log_b.exp() * (log_b - a.log_softmax(1))).sum(1)
    return Precision(
        rows=len(a),
        logits_std=float(b.std()),
        largest_error=float(errors.max()),
        mean_error=float(errors.mean()),
        mean_kl=float(divergence.mean()),
        same_argmax=int(is_same.sum()),
        clear_rows=int(is_clear.sum()),
        clear_same_argmax=int((is_clear & is_same).sum()),
    )


def measure(
    name: str, model: pathlib.Path, device: str, deviation: float, kv_cache_dtypes: Sequence[str]
) -> dict[str, Precision]:
    """The results of one shape by what computed, printed."""
    runs = {kind: run_ours(model, device, deviation, kind, LENGTHS) for kind in kv_cache_dtypes}
    reference = reference_model(model, device, deviation)
    exact = {kind: run_reference(reference, rows) for kind, rows in runs.items()}
    results = {
        f"headrace, KV {kind}": compare([torch.stack(each) for each in rows.logits], exact[kind])
        for kind, rows in runs.items()
    }
    first = kv_cache_dtypes[0]
    results[TRANSFORMERS] = compare(run_reference(in_bfloat16(reference), runs[first]), exact[first])
    for what, found in results.items():
        print(
            f"{name:14} {deviation:<6} {what:26} rows {found.rows:3}  logits' std {found.logits_std:.3f}  "
            f"error {found.largest_error:.2e} (mean {found.mean_error:.2e})  KL {found.mean_kl:.1e}  same argmax "
            f"{found.same_argmax}, {found.clear_same_argmax} of {found.clear_rows} clear ones",
            flush=True,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], help="shapes, or .json files")
    parser.add_argument("--deviations", nargs="+", type=float, default=[DEVIATION], help="of the weights")
    parser.add_argument("--more-kv-cache-dtypes", nargs="*", default=["fp8"], help="beside the model's own")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results: list[dict[str, object]] = []
    is_good = True
    for name, deviation in itertools.product(options.models, options.deviations):
        start = time.perf_counter()
        path = pathlib.Path(name) if name.endswith(".json") else SHAPES / f"{name}.json"
        found = measure(path.stem, path, options.device, deviation, ["auto", *options.more_kv_cache_dtypes])
        is_good &= found[OWN].is_good
        about = {"model": path.stem, "deviation": deviation}
        results += [{**about, "what": what, **dataclasses.asdict(each)} for what, each in found.items()]
        print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if out := os.environ.get("OUT"):
        pathlib.Path(out).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(out) / "precision.json").write_text(json.dumps(results, indent=1))
    print("as exact as it should be" if is_good else f"NOT within {LIMIT}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
