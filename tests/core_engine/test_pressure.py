"""What requests wait for is counted, shown and said in words that name the setting, and not said too often."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from core_engine import pressure
from core_engine.pressure import ADVICE, PATIENCE_S, SILENCE_S, Pressure, Wait
from tests.core_engine.loop_harness import FrontEnd, RunningEngine, WorkerThread
from tests.core_engine.simulation import VOCAB, Simulation


class Watched:
    """A simulation whose engine is looked at after each tick; a tick takes a second."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.simulation = Simulation(*args, **options)
        self.pressure = Pressure(self.simulation.core, lambda: self.simulation.now)
        self.said: list[tuple[float, str]] = []
        self.waits: list[Wait | None] = []

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.simulation.tick()
            self.said += [(self.simulation.now, words) for words in self.pressure.look()]
            self.waits.append(self.simulation.core.metrics.waiting_for)

    def submit(self, length: int, **fields: Any) -> Any:
        first = len(self.simulation.requests)
        prompt = [(first * 7 + 3 * position) % VOCAB for position in range(length)]
        return self.simulation.submit(prompt, **({"ignore_eos": True} | fields))

    def by_reason(self) -> dict[str, float]:
        core = self.simulation.core
        samples = core.metrics.samples(core.replicas, len(core.waiting))
        return {
            labels["reason"]: value
            for name, labels, value in samples
            if name == "headrace:num_requests_waiting_by_reason"
        }


def test_nothing_is_said_of_an_idle_or_a_full_engine() -> None:
    watched = Watched(400, max_num_seqs=4)
    watched.tick(3)
    for _ in range(20):
        watched.submit(6, max_tokens=30)
    watched.tick(40)
    assert not watched.said, "every seat is taken: more requests than may run are no fault of a setting"
    assert watched.waits[10] is Wait.SEATS
    assert watched.by_reason() == {wait.value: 0 for wait in Wait} | {"seats": len(watched.simulation.core.waiting)}
    watched.simulation.run()
    watched.tick()
    assert watched.waits[-1] is None
    assert set(watched.by_reason().values()) == {0}


def test_preemptions_are_counted_and_said_once_a_minute() -> None:
    watched = Watched(20, max_num_seqs=8, enable_prefix_caching=False)
    for _ in range(60):
        watched.submit(4, max_tokens=60)
    watched.tick(300)
    told = [(at, words) for at, words in watched.said if "preempted in the last" in words]
    total = int(watched.simulation.core.metrics.preemptions.value)
    assert 2 <= len(told) <= total
    assert all(after - before >= SILENCE_S for (before, _), (after, _) in itertools.pairwise(told))
    counts = [int(words.split()[0]) for _, words in told]
    assert 0 < sum(counts) <= total
    for flag in ("--gpu-memory-utilization", "--kv-cache-bytes", "--max-num-seqs", "--max-model-len"):
        assert flag in told[0][1]
    assert "because the KV cache was full" in told[0][1]


@pytest.mark.parametrize(
    ("num_host_blocks", "fate"),
    [(0, "will be computed again"), (4, "of them will come back from host memory"), (400, "wait in host memory")],
)
def test_what_becomes_of_the_preempted_is_said(num_host_blocks: int, fate: str) -> None:
    host = {"num_host_blocks": num_host_blocks, "swap_space": 1.0, "preemption_mode": "swap"}
    watched = Watched(20, max_num_seqs=8, enable_prefix_caching=False, **host)
    for _ in range(60):
        watched.submit(4, max_tokens=60)
    watched.tick(200)
    assert any(fate in words for _, words in watched.said), watched.said


def test_preemptions_for_a_priority_are_no_pressure() -> None:
    watched = Watched(200, policy="priority", max_num_seqs=2)
    for n in range(30):
        watched.submit(4, max_tokens=20, priority=30 - n)
        watched.tick()
    assert watched.simulation.core.metrics.preemptions.value > 0
    assert not watched.said


@pytest.mark.parametrize(
    ("reason", "flag", "blocks", "length", "options"),
    [
        (Wait.BLOCKS, "--kv-cache-bytes", 20, 60, {}),
        (Wait.WATERMARK, "--watermark", 40, 60, {"watermark": 0.6}),
        (Wait.RESERVE, "--max-output-tokens", 39, 110, {}),
        (Wait.BUDGET, "--max-prefill-tokens", 400, 100, {"max_prefill_tokens": 2}),
        (Wait.BUDGET, "--max-num-partial-prefills", 400, 100, {"max_prefill_tokens": 3, "max_num_batched_tokens": 8}),
    ],
    ids=lambda value: value.value if isinstance(value, Wait) else None,
)
def test_a_queue_beside_free_seats_is_said_with_its_flag(
    reason: Wait, flag: str, blocks: int, length: int, options: dict[str, Any]
) -> None:
    """One runs for long; those behind it find a seat, but something else is missing."""
    watched = Watched(blocks, max_num_seqs=8, enable_prefix_caching=False, **options)
    watched.submit(100 if reason is Wait.BUDGET else 10, max_tokens=140 if reason is Wait.RESERVE else 60)
    watched.tick(2)
    for _ in range(3):
        watched.submit(length, max_tokens=4)
    watched.tick(12)
    told = [(at, words) for at, words in watched.said if "although" in words]
    assert len(told) == 1, watched.waits
    at, words = told[0]
    assert at >= PATIENCE_S
    assert flag in words
    assert ADVICE[reason] in words
    assert "of at most" in words
    assert watched.waits[-1] is reason
    assert watched.by_reason()[reason.value] == len(watched.simulation.core.waiting) > 0
    watched.tick(int(SILENCE_S))
    assert len([words for _, words in watched.said if "although" in words]) <= 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_shared_prefix_that_is_being_computed(num_workers: int) -> None:
    simulation = Simulation(400, num_workers=num_workers, max_num_batched_tokens=256)
    for _ in range(3):
        simulation.submit([*range(97)], max_tokens=3)
    simulation.plan()
    assert simulation.replica.waits == {Wait.SHARED if num_workers == 1 else Wait.PLACEMENT: 1}
    simulation.run()


def test_a_suspect_that_runs_alone() -> None:
    watched = Watched(400)
    suspect, other = watched.submit(4, max_tokens=30), watched.submit(4, max_tokens=4)
    watched.simulation.core.suspects.requests[suspect] = None
    watched.simulation.plan()
    assert watched.simulation.replica.waits == {Wait.SUSPECT: 1}
    watched.simulation.run()
    assert other.finished


def test_a_search_that_lacks_seats() -> None:
    watched = Watched(200, max_num_seqs=6)
    watched.submit(4, max_tokens=60)
    watched.submit(4, max_tokens=60)
    watched.tick()
    watched.submit(4, beam_width=5, n=1, temperature=0.0, max_tokens=8)
    watched.tick(10)
    assert watched.waits[-1] is Wait.SEATS
    assert "--max-num-seqs" in watched.said[0][1]


def test_a_queue_that_shrinks_is_not_spoken_of() -> None:
    watched = Watched(40, max_num_seqs=8, watermark=0.6)
    for _ in range(12):
        watched.submit(30, max_tokens=3)
    for _ in range(100):
        watched.tick()
        if not watched.simulation.core.waiting:
            break
    assert any(wait is Wait.WATERMARK for wait in watched.waits)
    assert not [words for _, words in watched.said if "although" in words]


def test_an_engine_reports_what_is_waited_for(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path, max_num_seqs=1)
    with running, WorkerThread(running.workers), FrontEnd(running.front) as front:
        front.wait_ready()
        for first in range(12):
            front.submit([first, 2, 3], max_tokens=200, ignore_eos=True)
        name = "headrace:num_requests_waiting_by_reason"
        front.wait(lambda: (front.metric(name, reason=Wait.SEATS.value) or 0) > 1)
        assert front.metric(name, reason=Wait.BLOCKS.value) == 0
        front.wait_over()
        front.wait(lambda: front.metric(name, reason=Wait.SEATS.value) == 0)


def test_an_engine_says_what_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pressure, "LOOK_S", 0.01)
    monkeypatch.setattr(pressure, "PATIENCE_S", 0.0)
    running = RunningEngine(tmp_path, watermark=0.6)
    with running, WorkerThread(running.workers, num_blocks=70), FrontEnd(running.front) as front:
        front.wait_ready()
        for first in range(4):
            front.submit([first, *range(40)], max_tokens=150, ignore_eos=True)
        front.wait_over()
    said = [line for line in capsys.readouterr().out.splitlines() if "although" in line]
    assert len(said) == 1
    assert "--watermark" in said[0]
    assert "warning" in said[0]


def test_a_long_step_changes_no_reason() -> None:
    watched = Watched(20, enable_prefix_caching=False)
    watched.submit(10, max_tokens=60)
    watched.tick(2)
    watched.submit(60, max_tokens=4)
    watched.tick(3)
    assert watched.waits[-1] is Wait.RESERVE
    for _ in range(4):
        watched.simulation.now += 1.0
        watched.said += [(watched.simulation.now, words) for words in watched.pressure.look()]
    assert watched.by_reason()["kv_reserve"] == 1
    assert len(watched.said) == 1


def test_without_a_worker_there_is_nothing_to_change() -> None:
    watched = Watched(40)
    watched.simulation.core.end_epoch(watched.simulation.replica)
    watched.submit(3)
    for _ in range(20):
        watched.simulation.now += 1.0
        assert watched.pressure.look() == []
    assert watched.by_reason()["worker"] == 1
    watched.simulation.in_flight.clear()
    watched.simulation.start_worker()
    watched.simulation.run()


def test_it_looks_once_a_second() -> None:
    watched = Watched(40)
    watched.submit(3, max_tokens=4)
    watched.simulation.tick()
    assert watched.pressure.look() == []
    watched.simulation.replica.waits[Wait.SEATS] += 1
    watched.simulation.now += 0.5
    watched.pressure.look()
    assert watched.simulation.replica.waits
    watched.simulation.now += 0.6
    watched.pressure.look()
    assert not watched.simulation.replica.waits
