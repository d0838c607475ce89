"""Latencies as the caller sees them, from the moment a request was handed in. Names and buckets are the gateway's."""

from __future__ import annotations

from api_gateway.latency import FIRST_TOKEN_BUCKETS, REQUEST_BUCKETS, TOKEN_BUCKETS
from headrace.offline.jobs import Job
from shared.metrics import Registry


class Latency:
    """The latency histograms of one ``LLM``. Queueing on the caller's side counts: a batch is handed in at once."""

    def __init__(self) -> None:
        self.registry = Registry()
        histogram = self.registry.histogram
        self._first_token = histogram("vllm:time_to_first_token_seconds", FIRST_TOKEN_BUCKETS)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", TOKEN_BUCKETS)
        self._request = histogram("vllm:e2e_request_latency_seconds", REQUEST_BUCKETS)

    def tokens(self, job: Job, now: float, count: int) -> None:
        """A choice got ``count`` token rows."""
        if not job.first_token_at:
            job.first_token_at = now
            self._first_token.observe(now - job.arrived)
        elif job.n == 1:
            self._inter_token.observe((now - job.last_token_at) / count, count)
        job.last_token_at = now

    def over(self, job: Job) -> None:
        if job.error is None:
            self._request.observe(job.finished_at - job.arrived)
