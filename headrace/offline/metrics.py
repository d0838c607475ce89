"""The metrics of all processes as objects, under vLLM's class names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shared.messages import Load
from shared.metrics import Sample

if TYPE_CHECKING:
    from headrace.offline.session import Session

POLL_S = 0.01
SILENT_BEATS = 5
ENGINE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
"""What ``Load`` says in fields of its own: running, waiting, usage of the KV cache."""


@dataclasses.dataclass(slots=True)
class Metric:
    """``name`` without the suffixes of a scraped page; ``labels`` tell metrics of the same name apart."""

    name: str
    labels: dict[str, str]


@dataclasses.dataclass(slots=True)
class Counter(Metric):
    """Only grows; since the process that reports it began. What counts seconds has fractions."""

    value: int | float


@dataclasses.dataclass(slots=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


@dataclasses.dataclass(slots=True)
class Histogram(Metric):
    """``buckets``: upper bound, as text, to the number of observations up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclasses.dataclass(slots=True)
class Vector(Metric):
    """A counter for each of several positions."""

    values: list[int]


def metrics_of(session: Session) -> list[Metric]:
    """All metrics, from reports that are newer than the last rows that were received; waits two beats at most."""
    link = session.link
    end = time.monotonic() + 2 * session.settings.beat_s
    while not link.is_reported and time.monotonic() < end:
        time.sleep(POLL_S)
    name = (session.settings.served_model_name or [session.settings.model])[0]
    model = {"model_name": name}
    found: list[Metric] = []
    now = time.monotonic()
    for load, heard_at in list(link.loads.values()):
        role, _, process = load.source.partition("/")
        is_fresh = now - heard_at <= SILENT_BEATS * session.settings.beat_s
        found += _of_load(load, {**model, role: process}, is_fresh)
    return found + to_metrics(link.latency.registry.samples(), {**model, "engine": "llm"})


def to_metrics(samples: Iterable[Sample], labels: Mapping[str, str]) -> list[Metric]:
    """Scraped samples, put together."""
    found: dict[tuple[object, ...], Metric] = {}
    for sample, extra, value in samples:
        name, kind = _family(sample)
        bound = extra.get("le")
        own = {**labels, **{key: text for key, text in extra.items() if key != "le"}}
        key = (name, kind, *sorted(own.items()))
        if kind is Counter:
            found[key] = Counter(name, own, int(value) if value == int(value) else value)
        elif kind is Gauge:
            found[key] = Gauge(name, own, value)
        else:
            histogram = found.setdefault(key, Histogram(name, own, 0, 0.0, {}))
            assert isinstance(histogram, Histogram)
            if bound is not None:
                histogram.buckets[bound] = int(value)
            elif sample.endswith("_sum"):
                histogram.sum = value
            else:
                histogram.count = int(value)
    return list(found.values())


def _of_load(load: Load, labels: Mapping[str, str], is_fresh: bool) -> list[Metric]:
    """Gauges of an engine that has fallen silent are zero: nothing runs there."""
    gauges = {}
    if load.source.startswith("engine/"):
        values = (float(load.running), float(load.waiting), load.kv_usage)
        gauges = {name: value if is_fresh else 0.0 for name, value in zip(ENGINE_GAUGES, values, strict=True)}
    samples = [sample for sample in load.metrics if sample[0] not in gauges]
    return to_metrics([*((name, {}, value) for name, value in gauges.items()), *samples], labels)


def _family(sample: str) -> tuple[str, type[Metric]]:
    for suffix in ("_bucket", "_sum", "_count"):
        if sample.endswith(suffix):
            return sample.removesuffix(suffix), Histogram
    return (sample.removesuffix("_total"), Counter) if sample.endswith("_total") else (sample, Gauge)
