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


class StepLog:
    """Writes one JSON line for each step."""

    def __init__(self, path: str) -> None:
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115 - closed by close()

    def __call__(self, record: StepRecord) -> None:
        self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
