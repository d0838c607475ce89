"""Counters, gauges and histograms."""

from __future__ import annotations

import math

import pytest

from shared.metrics import Histogram, Registry


def test_samples_have_scraped_names():
    registry = Registry()
    registry.counter("requests").inc()
    registry.gauge("running").set(3)
    registry.histogram("latency_seconds", [0.1, 1.0]).observe(0.5)
    assert registry.samples() == [
        ("requests_total", {}, 1.0),
        ("running", {}, 3),
        ("latency_seconds_bucket", {"le": "0.1"}, 0.0),
        ("latency_seconds_bucket", {"le": "1.0"}, 1.0),
        ("latency_seconds_bucket", {"le": "+Inf"}, 1.0),
        ("latency_seconds_sum", {}, 0.5),
        ("latency_seconds_count", {}, 1.0),
    ]


def test_families():
    registry = Registry()
    finished = registry.counters("finished", "reason")
    finished.labels("stop").inc()
    finished.labels("stop").inc(2)
    finished.labels("length").inc()
    assert finished.labels("stop") is finished.labels("stop")
    registry.gauges("depth", "queue", "kind").labels("a", "b").dec()
    registry.histograms("size", "of", bounds=[1]).labels("x").observe(2)
    assert registry.samples() == [
        ("finished_total", {"reason": "stop"}, 3.0),
        ("finished_total", {"reason": "length"}, 1.0),
        ("depth", {"queue": "a", "kind": "b"}, -1.0),
        ("size_bucket", {"of": "x", "le": "1.0"}, 0.0),
        ("size_bucket", {"of": "x", "le": "+Inf"}, 1.0),
        ("size_sum", {"of": "x"}, 2),
        ("size_count", {"of": "x"}, 1.0),
    ]
    with pytest.raises(ValueError, match="need 1 values"):
        finished.labels("stop", "more")


def test_bounds_are_inclusive():
    histogram = Histogram([1, 2, 4])
    for value in (0, 1, 1.5, 2, 4, 5, math.inf):
        histogram.observe(value)
    assert [value for _, _, value in histogram.samples("x", {})[:4]] == [2, 4, 5, 7]
    assert histogram.count == 7


@pytest.mark.parametrize("bounds", [[], [2, 1], [1, 1], [1, math.inf], [math.nan]])
def test_bounds_that_are_none(bounds):
    with pytest.raises(ValueError, match="finite and ascending"):
        Histogram(bounds)


def test_a_name_is_taken_once():
    registry = Registry()
    registry.gauge("x")
    with pytest.raises(ValueError, match="registered already"):
        registry.counter("x")
