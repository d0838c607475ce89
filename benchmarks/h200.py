"""The workloads of ``headrace bench`` on one GPU, engine and worker in processes of their own.

    python benchmarks/h200.py --models qwen3-0.6b llama-3.1-8b --repeat 3 --out results.json

Random weights of the shapes that come with Headrace, bfloat16, token ids in, prefix caching off, greedy unless a
workload says otherwise. Each case runs ``--repeat`` times with other ids; the best run counts. ``decode bN`` is
(wall(256 out) - wall(1 out)) / 255 in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.offline import SHAPES
from headrace.bench.workloads import WORKLOADS, Request

CASES = ("decode_b1", "decode_b8", "decode_b32", "nano", "uniform", "mix")
SHORT_NAMES = {"qwen3-0.6b": "qwen06b", "llama-3.1-8b": "llama8b"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(SHORT_NAMES), choices=list(SHORT_NAMES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "h200.json")
    args = parser.parse_args()
    results: list[dict[str, Any]] = [environment()]
    for model in args.models:
        began = time.perf_counter()
        with LLM(
            str(SHAPES / f"{model}.json"),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=8192,
            enable_prefix_caching=False,
            enforce_eager=args.enforce_eager,
        ) as llm:
            add(results, model, "startup", time.perf_counter() - began, "s", 1)
            for case in args.cases:
                value, unit = CASES_OF[case.partition("_")[0]](llm, case, args.repeat)
                add(results, model, case, value, unit, args.repeat)
                args.out.write_text(json.dumps(results, indent=1))


def add(results: list[dict[str, Any]], model: str, case: str, value: float, unit: str, repeats: int) -> None:
    print(f"{model:14} {case:12} {value:12.3f} {unit}", flush=True)
    entry = {"model": SHORT_NAMES[model], "case": case, "value": value, "unit": unit, "repeats": repeats}
    results.append(entry)


def decode(llm: LLM, case: str, repeat: int) -> tuple[float, str]:
    """Milliseconds per token of N requests at once."""
    count = int(case.removeprefix("decode_b"))
    best = float("inf")
    for run in range(repeat + 1):
        first = WORKLOADS["decode"].make(count, llm.card.vocab_size, 2 * run + 1)
        other = WORKLOADS["decode"].make(count, llm.card.vocab_size, 2 * run + 2)
        long, _ = generate(llm, first, 0.0)
        short, _ = generate(llm, [Request(ids, 1) for ids, _ in other], 0.0)
        if run:  # the first one captures graphs
            best = min(best, 1000 * (long - short) / 255)
    return best, "ms/token"


def throughput(llm: LLM, case: str, repeat: int) -> tuple[float, str]:
    """Output tokens per second of all requests at once."""
    workload = WORKLOADS[case]
    best = 0.0
    for run in range(repeat + 1):
        seconds, tokens = generate(llm, workload.make(None, llm.card.vocab_size, run), workload.temperature)
        print(f"    {case} run {run}: {tokens / seconds:.0f} tok/s", flush=True)
        best = max(best, tokens / seconds)
    return best, "output tok/s"


CASES_OF: dict[str, Callable[[LLM, str, int], tuple[float, str]]] = {
    "decode": decode,
    "nano": throughput,
    "uniform": throughput,
    "mix": throughput,
}


def generate(llm: LLM, requests: Sequence[Request], temperature: float) -> tuple[float, int]:
    """Seconds and output tokens of a batch."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        for request in requests
    ]
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import torch
    import triton

    began = time.perf_counter()
    total = 0
    while total < 10_000_000:
        total += 1
    canary = time.perf_counter() - began
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "commit": commit.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": gpu,
        "python": platform.python_version(),
        "host_canary_s": round(canary, 3),
    }


if __name__ == "__main__":
    main()
