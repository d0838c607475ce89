"""The number of CPU threads follows what other processes leave."""

from __future__ import annotations

import pytest

from gpu_worker.threads import ThreadGovernor, busy_seconds, usable_cores


class Machine:
    """A clock and counters of work, in seconds."""

    def __init__(self) -> None:
        self.now, self.all, self.own = 0.0, 0.0, 0.0

    def governor(self, fixed: int | None = None, cores: int = 2) -> ThreadGovernor:
        return ThreadGovernor(fixed, cores, clock=lambda: self.now, busy=lambda: self.all, own=lambda: self.own)

    def pass_second(self, others: float, own: float = 1.0) -> None:
        self.now += 1.0
        self.own += own
        self.all += own + others


def test_gives_up_a_thread_beside_a_busy_process_and_takes_it_back() -> None:
    machine = Machine()
    governor = machine.governor()
    chosen = []
    for others in (0.0, 0.36, 0.9, 0.5, 0.5, 0.2, 0.5, 0.61):
        machine.pass_second(others)
        governor.update()
        chosen.append(governor.threads)
    assert chosen == [2, 2, 1, 1, 1, 2, 2, 1], "between the two borders the number stays as it is"


@pytest.mark.parametrize(("others", "threads"), [(0.3, 8), (0.9, 7), (2.5, 6), (7.9, 1), (30.0, 1)])
def test_many_cores(others: float, threads: int) -> None:
    machine = Machine()
    governor = machine.governor(cores=8)
    machine.pass_second(others, own=4.0)
    governor.update()
    assert governor.threads == threads


def test_looks_once_an_interval_and_says_when_it_changed() -> None:
    machine = Machine()
    governor = machine.governor()
    machine.now += 0.1
    machine.all += 0.1
    assert not governor.update()
    machine.pass_second(1.0)
    assert governor.update()
    assert governor.others == pytest.approx(1.0)
    assert not governor.update()


def test_a_fixed_number_stays() -> None:
    machine = Machine()
    governor = machine.governor(fixed=3)
    machine.pass_second(2.0)
    assert not governor.update()
    assert governor.threads == 3


def test_reads_this_machine() -> None:
    assert usable_cores() >= 1
    assert busy_seconds() >= 0.0
