"""A request between its caller's thread and the thread that talks to the processes."""

from __future__ import annotations

from typing import Protocol

from headrace.offline.prompts import Prompt
from headrace.sampling_params import SamplingParams
from shared.hop import Log, Request
from shared.messages import ErrorInfo, TextSpec, TokenSpec


class Sink(Protocol):
    """Who waits for a job. All calls come from the link's thread and must not block."""

    def grew(self, job: Job, log: Log, first: int) -> None:
        """A choice got rows from offset ``first`` on."""

    def over(self, job: Job) -> None:
        """All choices have ended, or ``job.error`` is set; it will not change any more."""

    def flush(self) -> None:
        """All that one message brought was told."""


class Job:
    """One prompt and its choices.

    The link's thread writes it until it is over; then its logs and times are the reader's.
    """

    __slots__ = (
        "arrived",
        "error",
        "finished_at",
        "first_token_at",
        "index",
        "last_token_at",
        "over",
        "params",
        "prompt",
        "request",
        "request_id",
        "sink",
        "spec",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        spec: TextSpec | TokenSpec,
        arrived: float,
    ) -> None:
        self.request_id = request_id
        self.index = index
        """Among those that were given together."""
        self.prompt = prompt
        self.params = params
        self.spec = spec
        self.sink: Sink
        self.arrived = arrived
        """This time and the others: seconds since 1970; 0 for what has not happened."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.finished_at = 0.0
        self.request: Request | None = None
        """The hop's; None until it was sent."""
        self.error: ErrorInfo | None = None
        self.over = False

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def n(self) -> int:
        return self.spec.params.n
