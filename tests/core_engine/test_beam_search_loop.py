"""Beam searches in an engine with its sockets: submitted again, given rows, no longer wanted, out of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_engine.request import Request, stop_ids_of
from shared.errors import ErrorCode
from shared.hop import Request as HopRequest
from shared.messages import FINISHED, Abort, Ack, AckEntry, FinishReason, TokenSpec
from shared.sampling import SamplingParams
from tests.core_engine.loop_harness import FrontEnd, RunningEngine, WorkerThread, two_front_ends
from tests.core_engine.simulation import EOS_IDS
from tests.core_engine.test_beam_search import naive
from tests.core_engine.test_engine_loop import check_at_rest, prompt

SEARCH: dict[str, Any] = {"beam_width": 3, "n": 2, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def expected(request: HopRequest) -> list[tuple[list[int], FinishReason]]:
    params = request.spec.params
    ids = np.frombuffer(request.spec.prompt, np.int32)
    assert params.max_tokens is not None
    alone = Request(request.rid, params, ids, 0, 0.0, stop_ids_of(params, EOS_IDS), EOS_IDS)
    return naive(alone, len(ids) + params.max_tokens)


def check(request: HopRequest) -> None:
    found = [(log.ids.tolist(), log.end and log.end.reason) for log in request.logs]
    assert found == expected(request), request.rid


@contextmanager
def held(worker: WorkerThread) -> Iterator[None]:
    """The worker computes nothing meanwhile."""
    reached, released = threading.Event(), threading.Event()
    worker.errands.append(lambda: (reached.set(), released.wait(10)))
    assert reached.wait(10)
    yield
    released.set()


def started(worker: WorkerThread, front: FrontEnd, num_steps: int) -> None:
    """Wait until so many steps were computed."""
    front.wait(lambda: len(worker.executed) >= num_steps)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
@pytest.mark.parametrize("rows", [(), (1,), (0, 1)])
def test_another_tokenizer_submits_a_search_again(tmp_path: Path, num_steps: int, rows: tuple[int, ...]) -> None:
    """It goes on, or begins again, from the rows that this one has."""
    running = RunningEngine(tmp_path, max_num_seqs=3)
    with two_front_ends(running) as (engine, worker, gone, front):
        before = gone.submit(prompt(9, 3), "search", **SEARCH)
        started(worker, gone, num_steps)
        found = expected(before)
        assert isinstance(before.spec, TokenSpec)
        with held(worker):
            request = front.submit_with_rows("search", before.spec, {row: found[row][0][: 3 + row] for row in rows})
            front.wait(lambda: "search" in front.accepted_ids)
        front.wait_over()
        check(request)
        check_at_rest(engine)


def test_rows_that_are_not_found_again_are_told(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    spec = TokenSpec(SamplingParams(**SEARCH), np.array(prompt(9), np.int32).tobytes())
    with running as engine, WorkerThread(running.workers), FrontEnd(running.front) as front:
        front.wait_ready()
        request = front.submit_with_rows("search", spec, {0: [1, 1, 1]})
        front.wait_over()
        errors = [log.end.error for log in request.logs if log.end is not None and log.end.error is not None]
        assert {error.code for error in errors} == {ErrorCode.LOST}
        check_at_rest(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_nobody_needs_more_of_it(tmp_path: Path, num_steps: int) -> None:
    """Of its first choice, then of the whole."""
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers, num_blocks=200) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        request = front.submit(prompt(9), **{**SEARCH, "max_tokens": 100})
        front.wait(lambda: request.rid in front.accepted_ids)
        started(worker, front, num_steps)
        assert request.lower is not None
        ids = request.rid, request.lower.attempt, request.lower.handle
        with held(worker):
            front.link.send(Ack([AckEntry(*ids, [FINISHED, 0])]))
            time.sleep(0.05)
        done = len(worker.executed)
        front.wait(lambda: len(worker.executed) > done + 2)
        front.link.send(Abort(*ids[:2]))
        check_at_rest(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_its_time_is_over(tmp_path: Path, num_steps: int) -> None:
    """Waiting for seats, computing its prompt, or between any two steps; what runs beside it goes on."""
    running = RunningEngine(tmp_path, max_num_seqs=4)
    with running as engine, WorkerThread(running.workers, num_blocks=200) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        beside = front.submit(prompt(6), **{**SEARCH, "beam_width": 2, "max_tokens": 30})
        started(worker, front, 1)
        wide = {"beam_width": 4} if num_steps == 0 else {"beam_width": 2}
        late = front.submit(prompt(9, 5), deadline_s=0.3, **{**SEARCH, **wide, "max_tokens": 100})
        started(worker, front, 1 + num_steps)
        with held(worker):
            front.wait(lambda: late.over)
        assert [log.end.error.code for log in late.logs if log.end and log.end.error] == [ErrorCode.TIMEOUT] * 2
        front.wait_over()
        check(beside)
        check_at_rest(engine)
