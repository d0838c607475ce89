"""How much of each workload is run, and requests through a running engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

from headrace import LLM, RequestOutput, SamplingParams
from headrace.bench.workloads import WORKLOADS, Request


class Skipped(Exception):
    """A case cannot be measured with this engine, which is no failure; the text says why."""


class Timed(NamedTuple):
    seconds: float
    tokens: int
    """Of all outputs, counted in them."""


class Work:
    """The amount of work, and token ids that no two batches have in common.

    Args:
        repeat: runs of a case; the best one counts.
        scale: of the numbers of requests and of their lengths; below 1 the code is tried, and nothing is measured.
    """

    def __init__(self, repeat: int, scale: float = 1.0) -> None:
        self.repeat = repeat
        self.scale = scale
        self._seeds = itertools.count()

    def seed(self) -> int:
        """Another one with each call."""
        return next(self._seeds)

    def scaled(self, whole: int, at_least: int = 1) -> int:
        return whole if self.scale == 1 else max(at_least, round(whole * self.scale))

    def workload(self, name: str, vocab_size: int) -> list[Request]:
        """All requests of a workload of ``headrace.bench.workloads``, with new ids."""
        requests = WORKLOADS[name].make(None, vocab_size, self.seed())
        return [self._shortened(request) for request in requests[: self.scaled(len(requests), 2)]]

    def decode(self, count: int, vocab_size: int) -> list[Request]:
        """``count`` × (128 in, 256 out), with new ids."""
        return [self._shortened(request) for request in WORKLOADS["decode"].make(count, vocab_size, self.seed())]

    def _shortened(self, request: Request) -> Request:
        ids, output_len = request
        return Request(ids[: self.scaled(len(ids))], self.scaled(output_len, 2))


def generate(llm: LLM, requests: Sequence[Request], temperature: float = 0.0) -> Timed:
    """Run all requests at once."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for _, output_len in requests
    ]
    began = time.perf_counter()
    outputs: list[RequestOutput] = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, False)
    seconds = time.perf_counter() - began
    return Timed(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))


def with_output(requests: Sequence[Request], output_len: int) -> list[Request]:
    """The same prompts with another number of output tokens."""
    return [Request(ids, output_len) for ids, _ in requests]
