"""``headrace bench throughput``: many requests at once, and how many tokens per second come out."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.argument_types import at_least
from headrace.bench import offline
from headrace.bench.datasets import SampleRequest, add_dataset_flags, load_dataset
from headrace.bench.tokenizer import BenchTokenizer
from headrace.bench.workloads import WORKLOADS
from headrace.sampling_params import SamplingParams
from shared.config import Settings

if TYPE_CHECKING:
    from headrace.llm import LLM

DECODE = "decode"
WARMUP_TOKENS = 16
OTHER_SEED = 1_000_003
"""Added to the seed of requests that must not find those of the measured run in the prefix cache."""
FORMULAS = """\
elapsed         = time from the call of generate() to its return, all requests at once
requests/s      = requests / elapsed
output tokens/s = tokens of all outputs / elapsed
total tokens/s  = (tokens of all prompts + of all outputs) / elapsed"""
DECODE_FORMULA = "ms per token    = (elapsed - elapsed with 1 output token) / (output tokens of a choice - 1)"


def main(argv: Sequence[str]) -> int:
    """Parse, measure, print and write; returns an exit code. Flags, result lines and JSON keys are vLLM's."""
    return offline.run(
        "throughput",
        argv,
        _add_flags,
        measure,
        description="Measure the throughput of many requests that are there at once. nano, uniform, mix and decode are "
        "workloads with the same lengths for every engine.",
    )


def measure(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Run the requests ``--repeat`` times and print the figures; returns those of the median run, times in seconds."""
    shape = offline.shape_of(settings)
    tokenizer = offline.tokenizer_of(settings, shape)
    batches = [_requests(options, shape, tokenizer, settings.seed + i) for i in range(options.repeat)]
    text = offline.makes_text(shape, options)
    has_texts = any(isinstance(request.prompt, str) for request in batches[0])
    temperature = WORKLOADS[options.dataset_name].temperature if options.dataset_name in WORKLOADS else 1.0
    params = SamplingParams(n=options.n, temperature=temperature, ignore_eos=True, detokenize=text)
    show = not options.disable_tqdm
    with offline.open_llm(settings, tokenizer=text or has_texts) as llm:
        others = _requests(options, shape, tokenizer, settings.seed + OTHER_SEED)
        if warmup := [_with_length(request, WARMUP_TOKENS) for request in others[: options.num_warmups]]:
            run_once(llm, warmup, params, progress=False)
        runs = []
        for number, batch in enumerate(batches, 1):
            figures = run_once(llm, batch, params, progress=show)
            if options.dataset_name == DECODE:
                others = _requests(options, shape, tokenizer, settings.seed + OTHER_SEED + number)
                figures |= _decode_time(llm, others, params, figures["elapsed_time"], batch[0].expected_output_len)
            runs.append(figures)
            if options.repeat > 1:
                print(f"run {len(runs)}: {_rates(figures)}")
    median = sorted(runs, key=lambda figures: figures["elapsed_time"])[(len(runs) - 1) // 2]
    print(_as_text(median, len(runs)))
    return {**median, "runs": runs}


def run_once(llm: LLM, requests: Sequence[SampleRequest], params: SamplingParams, *, progress: bool) -> dict[str, Any]:
    """Generate all ``requests`` at once and return the figures by vLLM's names; tokens are counted, not assumed."""
    prompts = [r.prompt if isinstance(r.prompt, str) else {"prompt_token_ids": r.prompt} for r in requests]
    each = []
    for request in requests:
        own = copy.copy(params)
        own.max_tokens = request.expected_output_len
        each.append(own)
    began = time.perf_counter()
    outputs = llm.generate(prompts, each, use_tqdm=progress)
    elapsed = time.perf_counter() - began
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "cached_prompt_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
    }


def _requests(
    options: argparse.Namespace, shape: offline.Shape, tokenizer: BenchTokenizer, seed: int
) -> list[SampleRequest]:
    requests = load_dataset(options, tokenizer, seed)
    longest = max(requests, key=lambda request: request.prompt_len + request.expected_output_len)
    shape.check_length(longest.prompt_len + longest.expected_output_len, "the longest prompt + output")
    return requests


def _decode_time(
    llm: LLM, others: Sequence[SampleRequest], params: SamplingParams, elapsed: float, length: int
) -> dict[str, float]:
    """Milliseconds per token after the first: the time of ``others``, of the same lengths, with one is subtracted."""
    short = run_once(llm, [_with_length(request, 1) for request in others], params, progress=False)
    per_token = (elapsed - short["elapsed_time"]) / max(1, length - 1)
    return {"elapsed_time_one_token": short["elapsed_time"], "ms_per_token": 1000 * per_token}


def _with_length(request: SampleRequest, length: int) -> SampleRequest:
    return SampleRequest(request.prompt, request.prompt_len, min(length, request.expected_output_len))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_dataset_flags(parser)
    parser.add_argument("--n", type=at_least(1), default=1, help="outputs of each prompt (default: 1)")
    parser.add_argument(
        "--repeat",
        type=at_least(1),
        default=1,
        help="runs, each with the next seed, so that no run finds another's prompts cached; the median counts",
    )
    parser.add_argument(
        "--num-warmups", type=at_least(0), default=8, help="short requests before, not counted (default: 8)"
    )


def _rates(figures: Mapping[str, Any]) -> str:
    rates = (
        f"{figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    return rates + (f", {figures['ms_per_token']:.3f} ms per token" if "ms_per_token" in figures else "")


def _as_text(figures: Mapping[str, Any], runs: int) -> str:
    lines = [
        f"Throughput: {_rates(figures)}",
        f"Total num prompt tokens:  {figures['total_prompt_tokens']}",
        f"Total num output tokens:  {figures['total_output_tokens']}",
    ]
    if runs > 1:
        lines.append(f"(the median of {runs} runs)")
    lines += ["", FORMULAS]
    if "ms_per_token" in figures:
        lines.append(DECODE_FORMULA)
    return "\n".join(lines)
