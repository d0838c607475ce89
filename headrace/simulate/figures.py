"""The figures of a simulation, by the definitions of ``headrace bench serve``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from headrace.bench.metrics import Distribution
from headrace.simulate.run import NOT_YET, Floats, Outcome
from headrace.simulate.timeline import Cause

SHOWN = ("ttft", "tpot", "itl", "e2el", "queue")
PERCENTILES = (50, 90, 99)
NUM_SPANS = 120
GAP_SAMPLES = 20_000


@dataclasses.dataclass(frozen=True)
class Figures:
    """What ``outcome`` amounts to."""

    outcome: Outcome
    num_replicas: int
    request_s: float
    """Part of every time to first token and latency: ``Device.request_s``."""

    @cached_property
    def latencies(self) -> Mapping[str, Distribution]:
        """By name, the keys of ``SHOWN``: those of ``headrace.bench.metrics``, and the time in the queue."""
        found = self.outcome
        done = found.first != NOT_YET
        sent, first, ended = found.sent[done], found.first[done], found.ended[done]
        several = found.output[done] > 1
        tpot = ((ended - first)[several]) / (found.output[done][several] - 1)
        requests, which = np.unique(found.request[done], return_inverse=True)
        starts, firsts, ends = np.full(len(requests), np.inf), np.full(len(requests), np.inf), np.zeros(len(requests))
        np.minimum.at(starts, which, sent)
        np.minimum.at(firsts, which, first)
        np.maximum.at(ends, which, ended)
        gaps = Distribution(found.gaps.samples(GAP_SAMPLES))
        gaps.mean = 1000.0 * found.gaps.mean
        return {
            "ttft": _distribution(firsts - starts + self.request_s),
            "tpot": _distribution(tpot),
            "itl": gaps,
            "e2el": _distribution(ends - starts + self.request_s),
            "queue": _distribution(found.scheduled[done] - sent),
        }

    @cached_property
    def completed(self) -> int:
        """Requests."""
        return len(np.unique(self.outcome.request[self.outcome.first != NOT_YET]))

    @property
    def refused(self) -> int:
        """Requests."""
        return self.outcome.refused.total()

    @cached_property
    def duration_s(self) -> float:
        """From the first request to the end of the last one."""
        sent = self.outcome.sent[self.outcome.sent != NOT_YET]
        return float(self.outcome.ended.max() - sent.min()) + self.request_s if len(sent) else 0.0

    @cached_property
    def arrival_rate(self) -> float:
        """Requests/s of those that were let in, while they came; infinite if they came at once."""
        sent = self.outcome.sent[self.outcome.sent != NOT_YET]
        span = float(sent.max() - sent.min()) if len(sent) else 0.0
        return self.completed / span if span > 0.0 else float("inf")

    @cached_property
    def input_tokens(self) -> int:
        """Of completed requests, each prompt once."""
        done = np.flatnonzero(self.outcome.first != NOT_YET)
        _, index = np.unique(self.outcome.request[done], return_index=True)
        return int(self.outcome.prompt[done[index]].sum())

    @property
    def output_tokens(self) -> int:
        return int(self.outcome.output.sum())

    def per_s(self, amount: float) -> float:
        return amount / self.duration_s if self.duration_s else 0.0

    @cached_property
    def busy_share(self) -> float:
        """Share of the time in which the devices compute."""
        return min(self.per_s(self.outcome.busy_s) / self.num_replicas, 1.0)

    @cached_property
    def usage_mean(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return self.outcome.timeline.mean("used_blocks") / self.outcome.num_blocks

    @cached_property
    def usage_max(self) -> float:
        return self.most("used_blocks") / self.outcome.num_blocks

    def most(self, name: str) -> float:
        """The highest of a level of the timeline."""
        return float(self.outcome.timeline.table()[name].max())

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache held, 0 to 1."""
        return self.outcome.cache_hits / max(self.outcome.cache_queries, 1)

    @property
    def recomputed_share(self) -> float:
        """Tokens that were computed again after a preemption, by prompt tokens."""
        return self.outcome.recomputed_tokens / max(self.input_tokens, 1)

    @cached_property
    def causes(self) -> Mapping[Cause, float]:
        """Share of the time for each cause why somebody waits."""
        return self.outcome.timeline.cause_shares()

    def to_json(self) -> dict[str, Any]:
        """The figures by the keys of ``headrace bench serve --save-result``, and more."""
        found = self.outcome
        result: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.refused,
            "refused": dict(found.refused),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.per_s(self.completed),
            "output_throughput": self.per_s(self.output_tokens),
            "total_token_throughput": self.per_s(self.input_tokens + self.output_tokens),
            "running_mean": found.timeline.mean("running"),
            "running_max": self.most("running"),
            "waiting_mean": found.timeline.mean("waiting"),
            "waiting_max": self.most("waiting"),
            "num_blocks": found.num_blocks,
            "kv_usage_mean": self.usage_mean,
            "kv_usage_max": self.usage_max,
            "preemptions": found.preemptions,
            "recomputed_tokens": found.recomputed_tokens,
            "prefix_cache_queries": found.cache_queries,
            "prefix_cache_hits": found.cache_hits,
            "steps": found.steps,
            "mean_step_ms": 1000 * found.busy_s / max(found.steps, 1),
            "mean_step_tokens": found.step_tokens / max(found.steps, 1),
            "device_busy": self.busy_share,
            "waiting_for": {cause.name.lower(): share for cause, share in self.causes.items()},
        }
        for key in SHOWN:
            each = self.latencies[key]
            result |= {f"mean_{key}_ms": each.mean, f"median_{key}_ms": each.median, f"std_{key}_ms": each.std}
            result |= {f"p{p}_{key}_ms": each.percentile(p) for p in PERCENTILES}
        result["series"] = {name: values.tolist() for name, values in found.timeline.series(NUM_SPANS).items()}
        return result


def _distribution(seconds: Floats) -> Distribution:
    return Distribution(seconds.tolist() if len(seconds) else [])
