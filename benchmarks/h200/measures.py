"""The cases: what is run, and which figures come of it.

A measure yields the figures of one run after the other, by the name of their case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.h200 import starts
from benchmarks.h200.documents import documents
from benchmarks.h200.recovery import recovery
from benchmarks.h200.work import Skipped, Work, generate, with_output
from headrace import LLM, SamplingParams
from headrace.bench.mixed import measure_mixed
from headrace.bench.workloads import WORKLOADS, Request, random_prompts
from headrace.offline.metrics import Counter
from headrace.offline.streams import AsyncStream
from shared.messages import ModelCard

Figures = dict[str, float]
Measure = Callable[[Any, Work, str], Iterator[Figures]]
"""Takes what the case's group has opened (an ``LLM``, or a checkpoint), the amount of work and the case's name."""

WARMUP_TOKENS = 8
"""Output tokens of a run before, in which graphs of a batch size are captured."""
PREFIX_REQUESTS, PREFIX_SHARED, PREFIX_OWN, PREFIX_OUTPUT = 64, 4096, 128, 256
IDLE, BUSY = "headrace:step_idle_seconds", "headrace:step_compute_seconds"
"""The engine's counters of the time that the GPU has waited for steps, and computed them."""


def decode(llm: LLM, work: Work, case: str) -> Iterator[Figures]:
    """``decode_bN``: milliseconds per token of N requests at once, (wall(256 out) - wall(1 out)) / 255."""
    count, vocab_size = _rows(case), llm.card.vocab_size
    generate(llm, with_output(work.decode(count, vocab_size), WARMUP_TOKENS))
    for _ in range(work.repeat):
        requests = work.decode(count, vocab_size)
        long = generate(llm, requests)
        short = generate(llm, with_output(work.decode(count, vocab_size), 1))
        yield {case: 1000 * (long.seconds - short.seconds) / (requests[0].output_len - 1)}


def throughput(llm: LLM, work: Work, case: str) -> Iterator[Figures]:
    """``nano``, ``uniform`` and ``mix``: output tokens per second of all requests at once."""
    name = case.partition("_")[0]
    for _ in range(work.repeat):
        found = generate(llm, work.workload(name, llm.card.vocab_size), WORKLOADS[name].temperature)
        yield {case: found.tokens / found.seconds}


def prefix(llm: LLM, work: Work, case: str) -> Iterator[Figures]:
    """Output tokens per second of 64 × (4,096 shared + 128 own in, 256 out), the shared part in the cache before."""
    lengths = [work.scaled(PREFIX_SHARED), *[work.scaled(PREFIX_OWN)] * work.scaled(PREFIX_REQUESTS, 2)]
    for _ in range(work.repeat):
        shared, *own = random_prompts(lengths, llm.card.vocab_size, work.seed())
        generate(llm, [Request(shared, 1)])
        found = generate(llm, [Request(shared + ids, work.scaled(PREFIX_OUTPUT, 2)) for ids in own])
        yield {case: found.tokens / found.seconds}


def mixed(llm: LLM, work: Work, case: str) -> Iterator[Figures]:
    """32 steady decodes and an 8,192-token prompt each second: gaps between tokens and time to first token, in ms.

    Run once, since the best of several would not be the worst gap that a reader sees.
    """
    found = asyncio.run(
        measure_mixed(
            _Streams(llm),
            prompt_len=work.scaled(8192, 16),
            interval_s=min(1.0, max(0.05, work.scale)),
            num_prompts=work.scaled(10, 2),
            num_warmups=work.scaled(2),
            seed=work.seed(),
        )
    )
    yield {
        f"{case}_worst_gap": found.worst_gap_ms,
        f"{case}_median_ttft": found.median_ttft_ms,
        f"{case}_p50_gap": found.gap_percentiles_ms["50"],
        f"{case}_p99_gap": found.gap_percentiles_ms["99"],
    }


class _Streams:
    """An ``LLM`` as ``measure_mixed`` takes it: an ``AsyncLLM`` over processes that run already."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def card(self) -> ModelCard:
        return self._llm.card

    def generate(self, prompt: Any, sampling_params: SamplingParams | None = None) -> AsyncStream:
        return self._llm.generate_async(prompt, sampling_params)


def idle(llm: LLM, work: Work, case: str) -> Iterator[Figures]:
    """``idle_bN``: share of the time of decode steps of N rows in which the GPU waits for the next one.

    As ``decode_bN``: what a run with one output token takes is subtracted.
    """
    count, vocab_size = _rows(case), llm.card.vocab_size
    generate(llm, with_output(work.decode(count, vocab_size), WARMUP_TOKENS))
    before = gpu_seconds(llm)
    for _ in range(work.repeat):
        generate(llm, work.decode(count, vocab_size))
        between = gpu_seconds(llm)
        generate(llm, with_output(work.decode(count, vocab_size), 1))
        after = gpu_seconds(llm)
        waited, computed = (2 * half - start - end for start, half, end in zip(before, between, after, strict=True))
        before = after
        yield {case: waited / (waited + computed)}


def gpu_seconds(llm: LLM) -> tuple[float, float]:
    """Seconds that the GPU has waited for steps and computed them, since the start.

    Raises:
        Skipped: the worker does not measure them.
    """
    totals = {IDLE: 0.0, BUSY: 0.0}
    for metric in llm.get_metrics():
        if metric.name in totals and isinstance(metric, Counter):
            totals[metric.name] += metric.value
    if not totals[BUSY]:
        raise Skipped("the worker does not measure the device's time")
    return totals[IDLE], totals[BUSY]


def _rows(case: str) -> int:
    """``decode_b8``, ``decode_b8_eager`` → 8"""
    return int(case.split("_")[1].removeprefix("b"))


MEASURES: dict[str, Measure] = {
    "decode": decode,
    "nano": throughput,
    "uniform": throughput,
    "mix": throughput,
    "prefix": prefix,
    "mixed": mixed,
    "documents": documents,
    "idle": idle,
    "startup": starts.startup,
    "recovery": recovery,
}
"""By the first word of a case."""
