"""Counts and durations of HTTP requests by route, method and status."""

from __future__ import annotations

from api_gateway.latency import REQUEST_BUCKETS
from shared.metrics import Registry

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, *REQUEST_BUCKETS)


class HttpMetrics:
    """Labels come from the router and from fixed sets, so that clients cannot make up series."""

    def __init__(self) -> None:
        self.registry = Registry()
        self._requests = self.registry.counters("http_requests", "handler", "method", "status")
        self._durations = self.registry.histograms("http_request_duration_seconds", "handler", bounds=_BUCKETS)

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request to ``route`` was answered with ``status`` after ``seconds``."""
        self._requests.labels(route, method if method in _METHODS else "OTHER", str(status)).inc()
        self._durations.labels(route).observe(seconds)
