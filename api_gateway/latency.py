"""Latencies as clients see them, from the arrival of a request at the gateway. Names and buckets are vLLM's."""

from __future__ import annotations

from api_gateway.request_log import ChoiceLog, PromptLog
from shared.metrics import Registry

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Latency:
    """The latency histograms of this gateway. A request is one prompt, whatever its number of choices."""

    def __init__(self) -> None:
        self.registry = Registry()
        histogram = self.registry.histogram
        self._first_token = histogram("vllm:time_to_first_token_seconds", FIRST_TOKEN_BUCKETS)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", TOKEN_BUCKETS)
        self._per_output_token = histogram("vllm:request_time_per_output_token_seconds", TOKEN_BUCKETS)
        self._request = histogram("vllm:e2e_request_latency_seconds", REQUEST_BUCKETS)

    def tokens(self, prompt: PromptLog, choice: ChoiceLog, now: float, arrived: float) -> None:
        """A choice has got rows, perhaps tokens among them."""
        count = len(choice.rows.ids) - choice.timed_rows
        if count <= 0:
            return
        if not prompt.has_tokens:
            prompt.has_tokens = True
            self._first_token.observe(now - arrived)
        if choice.timed_rows:
            self._inter_token.observe((now - choice.last_token_at) / count, count)
        else:
            choice.first_token_at = now
        choice.timed_rows += count
        choice.last_token_at = now

    def choice_ended(self, choice: ChoiceLog) -> None:
        if choice.timed_rows > 1 and choice.resumed is None:
            seconds = choice.last_token_at - choice.first_token_at
            self._per_output_token.observe(seconds / (choice.timed_rows - 1))

    def request_ended(self, seconds: float) -> None:
        self._request.observe(seconds)
