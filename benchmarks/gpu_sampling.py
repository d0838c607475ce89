"""The sampler's kernels on a GPU: right, and how long they take.

    python benchmarks/gpu_sampling.py --out "$OUT"

Tokens and log-probabilities are compared with those of the CPU's components (torch operations, here on the GPU), then
a step's sampling is timed in a CUDA graph. The logits of few rows stay in the L2 cache, as in a model, where the LM
head has just written them. ``<out>/sampling.json`` gets the times.

Without a GPU, ``TRITON_INTERPRET=1 python benchmarks/gpu_sampling.py --vocab 5003 --rows 2`` runs the comparisons
alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.cuda_sampler import CudaSampler, Variant, pack
from gpu_worker.sampling.logprobs import SampleLogprobs
from gpu_worker.sampling.sampler import Sampler
from shared.logprobs import unpack
from shared.messages import SlotInit
from shared.sampling import SamplingParams

BANDWIDTH = 4.27e12
"""Bytes a second that a device copy moves on an H200."""
CACHE = 30e6
"""Bytes of logits that stay in the L2 cache, where a pass is three times as fast."""
LAUNCH = 2.0
"""Microseconds of a small kernel in a graph, the gap to the next included."""
FULL_LAUNCHES = 9
MAX_LEN = 4096
IDS = random.Random(0)


class State(NamedTuple):
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    prompt_len: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that all ask for the same.

    Attributes:
        scale: standard deviation of the logits; 1.5 is flat, 6 as steep as a trained model.
        passes: times that the logits are read or written.
        fixed: microseconds of work that does not grow with the rows while they fit the GPU.
        unlike: rows in a thousand that may differ from the reference, by the rounding of sums and logarithms.
    """

    name: str
    variant: Variant
    params: dict[str, Any]
    scale: float = 6.0
    passes: float = 1.0
    fixed: float = 0.0
    unlike: int = 0


def cases(vocab_size: int) -> list[Case]:
    bias = [(token, 2.0) for token in IDS.sample(range(vocab_size), 300)]
    allowed = IDS.sample(range(vocab_size), 2000)
    words = [[token] for token in IDS.sample(range(vocab_size), 64)]
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    return [
        Case("greedy", "plain", {"temperature": 0.0}),
        Case("drawn", "plain", {"temperature": 0.6}, scale=1.5, passes=1.3, unlike=4),
        Case("drawn in full", "full", {"temperature": 0.6}, scale=1.5, passes=1.3, unlike=4),
        Case("min_p", "full", {"min_p": 0.05}, passes=2.3, unlike=4),
        Case("top_k 50, top_p 0.9", "full", {"top_k": 50, "top_p": 0.9}, passes=2.8, fixed=45, unlike=4),
        Case("top_p 0.9, steep", "full", {"top_p": 0.9}, passes=3.3, fixed=45, unlike=4),
        Case("top_p 0.9, flat", "full", {"top_p": 0.9}, scale=1.5, passes=14.0, fixed=100, unlike=8),
        Case("penalties", "full", {"temperature": 0.0, **penalties}, fixed=25),
        Case(
            "bias, bad words", "full", {"temperature": 0.0, "logit_bias": bias, "bad_words_token_ids": words}, fixed=8
        ),
        Case("allowed ids", "full", {"temperature": 0.0, "allowed_token_ids": allowed}, passes=2.0, fixed=8),
        Case("logprobs 5", "full", {"temperature": 0.0, "logprobs": 5}, passes=3.0, fixed=25),
        Case("logprobs 20", "full", {"temperature": 0.0, "logprobs": 20}, passes=4.0, fixed=50),
    ]


class Rig:
    """A case with its slots: row i has slot i."""

    def __init__(self, case: Case, vocab_size: int, rows: int, device: torch.device) -> None:
        self.case, self.rows, self.device = case, rows, device
        self.kernels = CudaSampler(rows, vocab_size, None, device)
        self.reference, self.logprobs = Sampler(rows, vocab_size, None, device), SampleLogprobs(rows)
        requests = [
            SlotInit(row, str(row), 0, 0, 0, 0, MAX_LEN, SamplingParams(seed=row * 7919, **case.params), [2])
            for row in range(rows)
        ]
        self.kernels.add(requests)
        for request in requests:
            self.reference.add(request)
            self.logprobs.add(request)
        lengths = torch.randint(1000, 3000, (rows + 1,), dtype=torch.int32, device=device)
        ids = torch.randint(vocab_size, (rows + 1, MAX_LEN), dtype=torch.int32, device=device)
        self.state = State(ids, lengths, lengths // 2)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.logits = torch.randn(rows, vocab_size, device=device) * case.scale

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.kernels.sample(logits, self.slots, self.state, self.case.variant)

    def check(self) -> int:
        """How many rows differ from the reference.

        Raises:
            AssertionError: more than rounding explains.
        """
        host = np.arange(self.rows)
        tokens, logprobs = self.sample(self.logits.clone())
        known, prompts = self.state.num_tokens[:-1].long(), self.state.prompt_len[:-1].long()
        rows = SampleRows(host, (known - prompts).cpu().numpy(), known, known.cpu().numpy(), self.state.token_ids)
        before = self.logprobs.before(self.logits, rows)
        wanted = self.reference.sample(self.logits.clone(), rows)
        unlike = int((tokens.long() != wanted).sum())
        assert unlike <= -(-self.rows * self.case.unlike // 1000), f"{unlike} of {self.rows} tokens differ"
        after = self.logprobs.after(before, tokens.long(), rows)
        if after is not None:
            assert logprobs is not None
            found = pack(logprobs.cpu().numpy(), self.kernels.wanted_logprobs(host))
            for (row, one), (other_row, other) in zip(found, after.pack(), strict=True):
                compare(row, one, other_row, other)
        return unlike


def compare(row: int, one: bytes, other_row: int, other: bytes) -> None:
    """Two records of a row; the last bits of a log-probability decide its rank among equals."""
    a, b = unpack(one), unpack(other)
    assert row == other_row
    assert abs(a.rank - b.rank) <= 1 + b.rank // 1000
    assert [entry.token_id for entry in a.top] == [entry.token_id for entry in b.top]
    np.testing.assert_allclose([e.logprob for e in a.top], [e.logprob for e in b.top], rtol=1e-5, atol=3e-5)
    np.testing.assert_allclose(a.token.logprob, b.token.logprob, rtol=1e-5, atol=3e-5)


def expected_us(case: Case, nbytes: int) -> float:
    bandwidth = BANDWIDTH if nbytes > CACHE else 3 * BANDWIDTH
    launches = 1 if case.variant == "plain" else FULL_LAUNCHES
    return max(5.0, LAUNCH * launches) + case.fixed + 1e6 * case.passes * nbytes / bandwidth


def microseconds(run: Callable[[], object], launches: int = 10, replays: int = 4) -> float:
    """Of one launch in a graph of many; the fastest replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / launches)
    return best


def measure(case: Case, vocab_size: int, rows: int, device: torch.device) -> dict[str, Any]:
    """Check a case, and time it if there is a GPU."""
    rig = Rig(case, vocab_size, rows, device)
    found: dict[str, Any] = {"vocab": vocab_size, "rows": rows, "case": case.name, "variant": case.variant}
    found["unlike"] = rig.check()
    line = f"{vocab_size:7} {rows:4} {case.name:20} {case.variant:6} right ({found['unlike']} unlike)"
    if device.type == "cuda":
        expected = expected_us(case, rig.logits.numel() * 4)
        took = microseconds(lambda: rig.sample(rig.logits))
        found |= {"us": took, "expected_us": expected}
        line += f" {took:9.2f} us, expected {expected:9.2f}"
    print(line, flush=True)
    return found


def time_add(vocab_size: int, device: torch.device) -> list[dict[str, Any]]:
    """What new requests cost on the host."""
    found = []
    sampler = CudaSampler(256, vocab_size, None, device)
    for name, params in (("plain", {}), ("full", {"top_k": 50, "logit_bias": [(5, 1.0)], "allowed_token_ids": [5, 6]})):
        for count in (1, 64):
            requests = [
                SlotInit(row, str(row), 0, 0, 0, 0, MAX_LEN, SamplingParams(seed=row, **params), [2])
                for row in range(count)
            ]
            times = []
            for _ in range(10):
                start = time.perf_counter()
                sampler.add(requests)
                times.append(1e6 * (time.perf_counter() - start))
            found.append({"vocab": vocab_size, "rows": count, "case": f"add {name}", "us": sorted(times)[5]})
            print(f"{vocab_size:7} {count:4} add {name:16} {found[-1]['us']:9.2f} us on the host", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder for sampling.json")
    parser.add_argument("--vocab", type=int, nargs="+", default=[151_936, 128_256])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    start = time.perf_counter()
    found = []
    with torch.inference_mode():
        for vocab_size in options.vocab:
            found += [measure(case, vocab_size, rows, device) for rows in options.rows for case in cases(vocab_size)]
            if device.type == "cuda":
                found += time_add(vocab_size, device)
    print(f"{time.perf_counter() - start:.1f} s")
    if options.out and device.type == "cuda":
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        (options.out / "sampling.json").write_text(json.dumps({**about, "sampling": found}, indent=1))


if __name__ == "__main__":
    main()
