"""Whether an engine that has work gets on."""

from __future__ import annotations

from core_engine.stall import StallWatch
from tests.core_engine.simulation import Simulation


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_work_without_progress_is_a_stall() -> None:
    simulation, time = Simulation(max_num_batched_tokens=8), Time()
    watch = StallWatch(simulation.core, time)
    time.now += 1000
    assert watch.stalled_s() == 0
    simulation.submit(list(range(40)), max_tokens=3)
    assert watch.stalled_s() == 0
    time.now += 7
    assert watch.stalled_s() == 7
    settled = 0
    while simulation.tick():
        time.now += 50
        progress = simulation.core.steps_settled > settled
        settled = simulation.core.steps_settled
        assert (watch.stalled_s() == 0) is (progress or not simulation.live)
    assert settled >= 5
    time.now += 1000
    assert watch.stalled_s() == 0


def test_a_worker_that_is_not_ready_or_has_just_begun_has_not_stalled() -> None:
    simulation, time = Simulation(), Time()
    watch = StallWatch(simulation.core, time)
    simulation.submit([1, 2, 3])
    assert watch.stalled_s() == 0
    time.now += 30
    assert watch.stalled_s() == 30
    simulation.restart_worker()
    assert watch.stalled_s() == 0
    time.now += 5
    assert watch.stalled_s() == 5
    simulation.core.end_epoch(simulation.core.replicas[0])
    time.now += 5
    assert watch.stalled_s() == 0
