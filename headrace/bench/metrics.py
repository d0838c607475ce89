"""Metrics of a served load, from the client's timelines of its requests; vLLM's definitions (``FORMULAS``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

LATENCIES = ("ttft", "tpot", "itl", "e2el")
FORMULAS = {
    "ttft": "TTFT = first output - send, per request",
    "tpot": "TPOT = (E2EL - TTFT) / (output tokens - 1), per request with 2 tokens or more",
    "itl": "ITL = gap between one output and the next, all gaps of all requests pooled",
    "e2el": "E2EL = last output - send, per request",
    "throughput": "throughput = tokens or requests of successful requests / benchmark duration",
    "peak": "peak output throughput = most output tokens in one of the seconds since the first send",
    "goodput": "goodput = successful requests that meet every objective / benchmark duration",
}
"""One line a metric. An output is a streamed event, which may carry several tokens; tokens are counted by the server's
``usage``. A request that waits for --max-concurrency is sent when the wait is over."""


@dataclass(slots=True)
class RequestRecord:
    """What the client saw of one request. Times are seconds on one clock."""

    sent: float = 0.0
    queued_s: float = 0.0
    """Wait for ``--max-concurrency`` before it was sent."""
    output_times: list[float] = field(default_factory=list)
    """When each output arrived."""
    ended: float = 0.0
    """When the last output arrived, or the reason to finish if that came later."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""
    """Why it failed; "" means that it succeeded."""

    @property
    def ttft_s(self) -> float:
        """Time to the first output; of a failed request without any, 0."""
        return self.output_times[0] - self.sent if self.output_times else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Gaps between outputs."""
        return [later - earlier for earlier, later in pairwise(self.output_times)]

    @property
    def e2el_s(self) -> float:
        """Time to the last output."""
        return self.ended - self.sent if self.ended else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first one; 0 when there is none."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Distribution:
    """Statistics of a latency in ms; all are 0 when there are no samples."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.ms = np.asarray(seconds if len(seconds) else [0.0], dtype=np.float64) * 1000.0
        self.mean = float(np.mean(self.ms))
        self.median = float(np.median(self.ms))
        self.std = float(np.std(self.ms))
        """Of the population (divided by n)."""

    def percentile(self, p: float) -> float:
        """The ``p``-th percentile, linear between samples."""
        return float(np.percentile(self.ms, p))


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one run; tokens and rates are those of successful requests."""

    duration_s: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    good: int | None
    """Requests that met every objective; None without objectives."""
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies: Mapping[str, Distribution]
    """By name, the keys of ``LATENCIES``."""

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s

    @property
    def request_goodput(self) -> float | None:
        return None if self.good is None else self.good / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration_s


def compute_metrics(records: Sequence[RequestRecord], duration_s: float, goodput: Mapping[str, float]) -> Metrics:
    """The metrics of a run.

    Args:
        duration_s: from the start of the run to the end of its last request.
        goodput: objectives in ms by name (ttft, tpot, e2el); empty: goodput is not asked for.
    """
    done = [record for record in records if not record.error]
    return Metrics(
        duration_s=duration_s,
        completed=len(done),
        failed=len(records) - len(done),
        total_input=sum(record.prompt_tokens for record in done),
        total_output=sum(record.output_tokens for record in done),
        good=sum(_meets(record, goodput) for record in done) if goodput else None,
        max_output_tokens_per_s=float(max(tokens_by_second(done), default=0.0)),
        max_concurrent_requests=max((running for _, running in running_requests(done)), default=0),
        latencies={
            "ttft": Distribution([record.ttft_s for record in done]),
            "tpot": Distribution([record.tpot_s for record in done if record.output_tokens > 1]),
            "itl": Distribution([gap for record in done for gap in record.itls_s]),
            "e2el": Distribution([record.e2el_s for record in done]),
        },
    )


def tokens_by_second(records: Sequence[RequestRecord], width_s: float = 1.0) -> list[float]:
    """Output tokens in each ``width_s`` since the first send; the tokens of a request are spread over its outputs."""
    if not records:
        return []
    began = min(record.sent for record in records)
    ended = max(record.ended for record in records)
    buckets = [0.0] * (math.floor((ended - began) / width_s) + 1)
    for record in records:
        share = record.output_tokens / max(len(record.output_times), 1)
        for time in record.output_times:
            buckets[math.floor((time - began) / width_s)] += share
    return buckets


def running_requests(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests between send and end from then on) at each change, in order; an end comes before a send."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    counts = np.cumsum([change for _, change in changes], dtype=np.int64).tolist()
    return [(time, count) for (time, _), count in zip(changes, counts, strict=True)]


def errors_by_kind(records: Sequence[RequestRecord]) -> list[tuple[str, int]]:
    """The errors of failed requests and how often each occurred, most frequent first."""
    return Counter(record.error for record in records if record.error).most_common()


def _meets(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2el_s}
    return all(measured[name] * 1000.0 <= limit for name, limit in goodput.items())
