"""The waiting queue, and the lines of the step log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from core_engine.queues import QUEUES
from core_engine.request import Request, Sequence
from core_engine.step_record import RowRecord, StepLog, StepRecord
from shared.sampling import SamplingParams


def sequence(order: int, choice: int = 0) -> Sequence:
    prompt = np.arange(3, dtype=np.int32)
    request = Request(f"r{order}", SamplingParams(), prompt, order, 0.0, frozenset())
    return Sequence(request, choice, np.empty(0, np.int32), 10)


def test_first_come_first_served() -> None:
    queue = QUEUES["fcfs"]()
    first, second, third, fourth = sequence(1), sequence(2, 0), sequence(2, 1), sequence(3)
    for each in (second, fourth, first, third):
        queue.push(each)
    assert list(queue) == [first, second, third, fourth]
    assert queue.num_prompt_tokens == 12
    queue.remove(first)
    queue.remove(third)
    assert len(queue) == 2
    queue.push(first)
    assert next(iter(queue)) is first
    with pytest.raises(KeyError):
        queue.remove(third)
    for each in (first, second, fourth):
        queue.remove(each)
    assert not queue
    assert queue.num_prompt_tokens == 0


def test_step_log(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record = StepRecord("w0", 1, 2, [RowRecord("a", 0, 5, True, [3, 4])], ["b"], ["c"], 5, 1, 0)
    log = StepLog(str(path))
    log(record)
    log(record)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == lines[1]
    assert lines[0] == {
        "replica": "w0",
        "epoch": 1,
        "step": 2,
        "rows": [{"request_id": "a", "choice": 0, "num_tokens": 5, "is_prefill": True, "block_table": [3, 4]}],
        "finished": ["b"],
        "preempted": ["c"],
        "num_tokens": 5,
        "num_prefills": 1,
        "num_decodes": 0,
    }
