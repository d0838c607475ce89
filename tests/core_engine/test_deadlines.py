"""Requests end when their time is over, running or waiting, and cost nothing before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from core_engine.deadlines import FEW, Deadlines
from core_engine.queues import QUEUES
from core_engine.request import Request, Sequence
from shared.errors import ErrorCode
from shared.hop import Request as HopRequest
from shared.messages import FinishReason
from shared.sampling import SamplingParams
from tests.core_engine.loop_harness import FrontEnd, RunningEngine, WorkerThread


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(rid: str) -> Request:
    made = Request(rid, SamplingParams(), np.arange(3, dtype=np.int32), 0, 0.0, frozenset())
    made.sequences = [Sequence(made, 0, np.empty(0, np.int32), 10)]
    return made


def test_expired_in_order_and_once() -> None:
    time = Time()
    deadlines = Deadlines(time)
    made = {seconds: request(str(seconds)) for seconds in (5, 1, 3, 1.5)}
    for seconds, each in made.items():
        deadlines.set(each, seconds)
    assert deadlines.expired() == []
    time.now += 3
    assert deadlines.expired() == [made[1], made[1.5], made[3]]
    assert deadlines.expired() == []
    made[5].sequences[0].ended_at = time.now
    time.now += 10
    assert deadlines.expired() == []


def test_the_latest_deadline_counts() -> None:
    time = Time()
    deadlines = Deadlines(time)
    moved = request("moved")
    for seconds in (1, 5, 3):
        deadlines.set(moved, seconds)
    time.now += 2
    assert deadlines.expired() == []
    time.now += 1
    assert deadlines.expired() == [moved]
    time.now += 10
    assert len(deadlines.expired()) <= 1


def test_those_that_ended_in_time_are_forgotten() -> None:
    deadlines = Deadlines(Time())
    for number in range(20 * FEW):
        ended = request(str(number))
        deadlines.set(ended, 1e6)
        ended.sequences[0].ended_at = 0.0
    assert len(deadlines) <= FEW


def error_of(asked: HopRequest) -> ErrorCode:
    end = asked.logs[0].end
    assert end is not None
    assert end.error is not None
    assert end.reason is FinishReason.ERROR
    return ErrorCode(end.error.code)


@pytest.mark.parametrize("policy", sorted(QUEUES))
@pytest.mark.parametrize("where", ["waiting for a worker", "waiting for a slot", "running"])
def test_the_engine_ends_what_is_out_of_time(tmp_path: Path, where: str, policy: str) -> None:
    running = RunningEngine(tmp_path, max_num_seqs=1, scheduling_policy=policy)
    with running as engine, FrontEnd(running.front) as front:
        if where == "waiting for a worker":
            front.wait(lambda: front.hello is not None)
            late = front.submit([1, 2, 3], deadline_s=0.2)
            front.wait_over()
            assert error_of(late) is ErrorCode.TIMEOUT
            assert not engine.core.waiting
            return
        with WorkerThread(running.workers) as worker:
            front.wait_ready()
            worker.deaf = True
            first = front.submit([1, 2, 3], deadline_s=0.3 if where == "running" else None, max_tokens=5)
            front.wait(lambda: engine.core.replicas[0].num_running == 1)
            second = front.submit([4, 5, 6], deadline_s=0.3 if where != "running" else None, max_tokens=5)
            late, other = (first, second) if where == "running" else (second, first)
            front.wait(lambda: late.over)
            assert error_of(late) is ErrorCode.TIMEOUT
            assert not other.over
            assert late.rid not in {each.rid for step in worker.executed for each in step.new}


def test_what_came_too_late_is_never_planned(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        late, good = front.submit([1, 2, 3], deadline_s=-0.1), front.submit([1, 2, 3], deadline_s=60)
        front.wait_over()
        assert error_of(late) is ErrorCode.TIMEOUT
        assert good.logs[0].end is not None
        assert good.logs[0].end.error is None
        assert {each.rid for step in worker.executed for each in step.new} == {good.rid}
        assert not engine.core.waiting
