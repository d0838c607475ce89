"""``headrace bench latency``: how long one batch of requests takes from the call to the last token."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.argument_types import at_least
from headrace.bench import offline
from headrace.sampling_params import SamplingParams
from shared.config import Settings

LAST_ID = 10_000
FORMULAS = """\
latency     = time from the call of generate() to its return, for the whole batch
percentiles = over the iterations, linearly interpolated"""


def main(argv: Sequence[str]) -> int:
    """Parse, measure, print and write; returns an exit code. Flags, defaults, result lines and JSON keys are vLLM's."""
    return offline.run(
        "latency",
        argv,
        _add_flags,
        measure,
        description="Measure the latency of one batch of requests with random prompts. The prefix cache is off unless "
        "--enable-prefix-caching is given, since every iteration sends the same prompts.",
        defaults={"enable_prefix_caching": False},
    )


def measure(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Run the iterations and print the figures; returns them by vLLM's names, times in seconds."""
    shape = offline.shape_of(settings)
    shape.check_length(options.input_len + options.output_len, "--input-len + --output-len")
    text = offline.makes_text(shape, options)
    params = SamplingParams(n=options.n, ignore_eos=True, max_tokens=options.output_len, detokenize=text)
    random = np.random.default_rng(settings.seed)
    ids = random.integers(min(LAST_ID, shape.config.vocab_size), size=(options.batch_size, options.input_len))
    prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
    with offline.open_llm(settings, tokenizer=text) as llm:

        def iterate() -> float:
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        for _ in offline.progress(range(options.num_iters_warmup), "Warmup iterations", options):
            iterate()
        latencies = [iterate() for _ in offline.progress(range(options.num_iters), "Bench iterations", options)]
    figures = {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": latencies,
        "percentiles": offline.percentiles(latencies),
    }
    print(_as_text(figures))
    return figures


def _add_flags(parser: argparse.ArgumentParser) -> None:
    whole = at_least(1)
    parser.add_argument("--input-len", type=whole, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--output-len", type=whole, default=128, help="tokens of an output (default: 128)")
    parser.add_argument("--batch-size", type=whole, default=8, help="prompts in the batch (default: 8)")
    parser.add_argument("--n", type=whole, default=1, help="outputs of each prompt (default: 1)")
    parser.add_argument("--num-iters-warmup", type=at_least(0), default=10, help="iterations not counted (default: 10)")
    parser.add_argument("--num-iters", type=whole, default=30, help="iterations counted (default: 30)")


def _as_text(figures: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            f"Avg latency: {figures['avg_latency']} seconds",
            f"Std latency: {figures['std_latency']} seconds",
            *(f"{name}% percentile latency: {value} seconds" for name, value in figures["percentiles"].items()),
            "",
            FORMULAS,
        ]
    )
