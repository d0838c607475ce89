"""What one step did, request by request: for logs, tests and measurements."""

from __future__ import annotations

import dataclasses
from typing import IO

import orjson


@dataclasses.dataclass(frozen=True, slots=True)
class RowRecord:
    """One sequence in one step."""

    request_id: str
    choice: int
    num_tokens: int
    """Tokens that are computed for it in this step."""
    is_prefill: bool
    block_table: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One planned step."""

    replica: str
    epoch: int
    step: int
    rows: list[RowRecord]
    finished: list[str]
    """Requests with a choice that released its blocks since the step before."""
    preempted: list[str]
    """Requests with a choice that was preempted, and gave its blocks back, since the step before."""
    num_tokens: int
    num_prefills: int
    num_decodes: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepTiming:
    """What a settled step took; ``headrace simulate --fit`` reads these lines. Seconds."""

    replica: str
    epoch: int
    step: int
    settled_at: float
    """On the engine's clock."""
    wall_s: float
    """Since the step before it was settled, or since it was planned if nothing was in flight then."""
    compute_s: float
    """On the device; 0: not known."""
    predicted_s: float | None
    """What it was planned for; None: its prefills were not cut by time, or it has none."""
    num_tokens: int
    """Prefill and decode rows."""
    context: int
    """Tokens that the decode rows attended to."""
    pairs: float
    """Query-key pairs of its prefill chunks."""
    is_prefill: bool
    num_in_flight: int
    """Steps that were in flight when it was settled, without it."""


class StepLog:
    """Writes one JSON line for each step that is planned, and one, with ``compute_s``, for each that is settled."""

    def __init__(self, path: str) -> None:
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115 - closed by close()

    def __call__(self, record: StepRecord | StepTiming) -> None:
        self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
