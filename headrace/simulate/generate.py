"""Traces that are drawn instead of read."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from headrace.bench.datasets import DEFAULT_NUM_PROMPTS
from headrace.bench.load import arrival_times
from headrace.bench.workloads import lognormal_lengths
from headrace.simulate.trace import TraceRequest
from shared.errors import StartupError

SHAREGPT_INPUT, SHAREGPT_OUTPUT = 220, 190
MOST_DRAWN = 1024
"""Where lognormal lengths are cut if their means are ShareGPT's; in proportion to the means otherwise."""


def generate(args: argparse.Namespace) -> list[TraceRequest]:
    """The requests of ``--dataset-name``, arriving as the flags of the traffic say.

    Raises:
        StartupError: flags contradict each other.
    """
    if not 0.0 <= args.random_range_ratio < 1.0:
        raise StartupError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio:g}")
    count = args.num_prompts or DEFAULT_NUM_PROMPTS
    arrivals = arrival_times(count, args.request_rate, args.burstiness, args.seed)
    requests = GENERATORS[args.dataset_name](args, count)
    for request, arrival in zip(requests, arrivals, strict=True):
        request.arrival_s = arrival
    return requests


def _random(args: argparse.Namespace, count: int) -> list[TraceRequest]:
    """Uniform lengths around a mean, after a prefix that all share."""
    rng = np.random.default_rng(args.seed)
    ratio, shared = args.random_range_ratio, args.random_prefix_len

    def lengths(mean: int) -> list[int]:
        low, high = max(1, int(np.floor(mean * (1 - ratio)))), int(np.ceil(mean * (1 + ratio)))
        drawn: list[int] = rng.integers(low, high + 1, count).tolist()
        return drawn

    inputs, outputs = lengths(args.random_input_len), lengths(args.random_output_len)
    prefix = (("shared", shared),) if shared else ()
    return [
        TraceRequest(arrival_s=0.0, prompt=shared + prompt, output=output, prefix=prefix)
        for prompt, output in zip(inputs, outputs, strict=True)
    ]


def _lognormal(args: argparse.Namespace, count: int) -> list[TraceRequest]:
    """Lengths like those of ShareGPT, or of other means."""
    mean_input = args.input_len or SHAREGPT_INPUT
    mean_output = args.output_len or SHAREGPT_OUTPUT
    scale = max(mean_input / SHAREGPT_INPUT, mean_output / SHAREGPT_OUTPUT)
    pairs = lognormal_lengths(count, mean_input, mean_output, high=int(MOST_DRAWN * max(scale, 1.0)), seed=args.seed)
    return [TraceRequest(arrival_s=0.0, prompt=prompt, output=output) for prompt, output in pairs]


def _prefix_repetition(args: argparse.Namespace, count: int) -> list[TraceRequest]:
    """Each prompt begins with one of a few long prefixes, the popular ones more often (Zipf)."""
    rng = np.random.default_rng(args.seed)
    number, shared, own = (
        args.prefix_repetition_num_prefixes,
        args.prefix_repetition_prefix_len,
        args.prefix_repetition_suffix_len,
    )
    shares = 1 / np.arange(1, number + 1)
    chosen = rng.choice(number, count, p=shares / shares.sum())
    return [
        TraceRequest(
            arrival_s=0.0,
            prompt=shared + own,
            output=args.prefix_repetition_output_len,
            prefix=((f"prefix-{each}", shared),),
        )
        for each in chosen.tolist()
    ]


GENERATORS: dict[str, Callable[[argparse.Namespace, int], list[TraceRequest]]] = {
    "random": _random,
    "sharegpt-like": _lognormal,
    "prefix_repetition": _prefix_repetition,
}
