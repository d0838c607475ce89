"""Counters, gauges and histograms of one process, without a global registry.

``Registry.samples`` gives them as they are scraped (``_total``, ``_bucket`` with ``le``, ``_sum``, ``_count``): the
form of ``Load.metrics``, which travels up to the gateway that exposes them. Counts are cumulative since the process's
boot. Not thread-safe: one thread owns a registry.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Sample = tuple[str, dict[str, str], float]
"""Scraped name, labels, value."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bucket bounds for times."""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [(name + "_total", labels, self.value)]


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        self.value -= amount

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [(name, labels, self.value)]


class Histogram:
    """Counts of observations by upper bound (inclusive), and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """``bounds`` are ascending and finite; ``+Inf`` is added.

        Raises:
            ValueError: they are not.
        """
        if not bounds or list(bounds) != sorted(set(bounds)) or not all(map(math.isfinite, bounds)):
            raise ValueError(f"bucket bounds must be finite and ascending, got {list(bounds)}")
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self._counts)

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        samples: list[Sample] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            samples.append((name + "_bucket", labels | {"le": bound}, float(total)))
        samples.append((name + "_sum", labels, self.sum))
        samples.append((name + "_count", labels, float(total)))
        return samples


class _Metric(Protocol):
    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]: ...


M = TypeVar("M", bound=_Metric)


class Family(Generic[M]):
    """One metric for each combination of label values. Keep what ``labels`` returns where it is used often."""

    def __init__(self, make: Callable[[], M], names: Sequence[str]) -> None:
        self._make = make
        self._names = tuple(names)
        self._metrics: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        """The metric of these label values, in the order of the names.

        Raises:
            ValueError: not one value for each name.
        """
        metric = self._metrics.get(values)
        if metric is None:
            if len(values) != len(self._names):
                raise ValueError(f"labels {self._names} need {len(self._names)} values, got {values}")
            metric = self._metrics[values] = self._make()
        return metric

    def samples(self, name: str, labels: dict[str, str]) -> list[Sample]:
        samples: list[Sample] = []
        for values, metric in self._metrics.items():
            samples += metric.samples(name, labels | dict(zip(self._names, values, strict=True)))
        return samples


class Registry:
    """The metrics of one process, by name (without the suffixes that scraping adds)."""

    def __init__(self) -> None:
        self._metrics: dict[str, _Metric] = {}

    def add(self, name: str, metric: M) -> M:
        """Register a metric or a ``Family``.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._metrics:
            raise ValueError(f"metric {name} is registered already")
        self._metrics[name] = metric
        return metric

    def counter(self, name: str) -> Counter:
        return self.add(name, Counter())

    def counters(self, name: str, *labels: str) -> Family[Counter]:
        """A family of counters with these label names."""
        return self.add(name, Family(Counter, labels))

    def gauge(self, name: str) -> Gauge:
        return self.add(name, Gauge())

    def gauges(self, name: str, *labels: str) -> Family[Gauge]:
        """A family of gauges with these label names."""
        return self.add(name, Family(Gauge, labels))

    def histogram(self, name: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        return self.add(name, Histogram(bounds))

    def histograms(self, name: str, *labels: str, bounds: Sequence[float] = SECONDS) -> Family[Histogram]:
        """A family of histograms with these label names."""
        return self.add(name, Family(lambda: Histogram(bounds), labels))

    def samples(self) -> list[Sample]:
        """All samples, for ``Load.metrics``."""
        return [sample for name, metric in self._metrics.items() for sample in metric.samples(name, {})]
