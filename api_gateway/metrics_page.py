"""The Prometheus page: what the engines report, under vLLM's names, and what the gateway measures itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from api_gateway.gateway import Gateway
from api_gateway.metrics_help import HELP
from shared.messages import Load
from shared.metrics import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ENGINE_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
"""What ``Load`` says in fields of its own: running, waiting, and twice the usage of the KV cache."""


class Page(Collector):
    """Samples of one scrape, family by family. A sample's name says which family and type it belongs to."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, str], Metric] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample under its scraped name (``_total``, ``_bucket``, ``_sum``, ``_count``; else a gauge)."""
        key = _family(name)
        metric = self._families.get(key)
        if metric is None:
            family, kind = key
            metric = self._families[key] = Metric(family, HELP.get(family, family), kind)
        metric.add_sample(name, dict(labels), value)

    def add_all(self, samples: Iterable[Sample], labels: Mapping[str, str]) -> None:
        for name, extra, value in samples:
            self.add(name, {**labels, **extra}, value)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())


def render(gateway: Gateway) -> bytes:
    """The page as it is now."""
    page = Page()
    model = {"model_name": gateway.names[0]}
    for load, is_fresh in gateway.links.loads():
        _add_load(page, load, model, is_fresh)
    page.add_all(gateway.latency.registry.samples(), {**model, "engine": "gateway"})
    page.add_all(gateway.http.registry.samples(), {})
    page.add("headrace:gateway_requests_active", {}, gateway.admission.active)
    page.add("headrace:gateway_rejections_total", {}, gateway.admission.rejected)
    page.add("headrace:gateway_timeouts_total", {}, gateway.overdue)
    return generate_latest(page)


def _add_load(page: Page, load: Load, model: Mapping[str, str], is_fresh: bool) -> None:
    """Of a process that has fallen silent, counts stay, so that they never fall. Gauges of what runs are zero, as
    nothing does that we know of; the others are gone."""
    role, _, process = load.source.partition("/")
    labels = {**model, role: process}
    if role == "engine":
        gauges = (load.running, load.waiting, load.kv_usage, load.kv_usage)
        for name, value in zip(ENGINE_GAUGES, gauges, strict=True):
            page.add(name, labels, value if is_fresh else 0.0)
        page.add("headrace:engine_stalled_seconds", labels, load.stalled_s if is_fresh else 0.0)
    rest = (sample for sample in load.metrics if sample[0] not in ENGINE_GAUGES)
    page.add_all((sample for sample in rest if is_fresh or _family(sample[0])[1] != "gauge"), labels)


def _family(sample: str) -> tuple[str, str]:
    """(family, type) of a scraped sample; a counter's family lacks ``_total``."""
    for suffix in ("_bucket", "_sum", "_count"):
        if sample.endswith(suffix):
            return sample.removesuffix(suffix), "histogram"
    return (sample.removesuffix("_total"), "counter") if sample.endswith("_total") else (sample, "gauge")
