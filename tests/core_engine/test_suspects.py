"""A query of death is found among others, which all go on; and nobody else is ever failed for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from core_engine import core as core_module
from core_engine.replica import Replica
from core_engine.request import Request
from core_engine.suspects import CLEAR_TOKENS, CONVICT, STRIKES, Suspects
from shared.errors import ErrorCode
from shared.messages import FinishReason
from tests.core_engine.loop_harness import FrontEnd, RunningEngine, WorkerThread
from tests.core_engine.simulation import VOCAB, Simulation
from tests.core_engine.test_engine_loop import check, check_at_rest

LONGEST = 2000
"""Ticks."""


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * position) % VOCAB for position in range(length)]


class Deadly(Simulation):
    """A worker dies of a step that names a request of ``deadly``, and is started again after some ticks.

    Args:
        load_ticks: that a worker takes to load.
    """

    def __init__(self, load_ticks: int = 3, **options: Any) -> None:
        self.deadly: dict[str, int] = {}
        """Request id: how many of its tokens are settled before that."""
        self.deaths = 0
        self._load_ticks = load_ticks
        self._starting: list[float] = []
        super().__init__(**options)

    def settle(self, replica: Replica | None = None) -> None:
        replica = replica or self.replica
        slots = replica.slots
        for slot in replica.window[0].rows.tolist():
            sequence = slots.sequence_at(slot)
            at = self.deadly.get(sequence.request.rid)
            if at is not None and slots.num_tokens[slot] - sequence.prompt_len >= at:
                self.die(replica)
                return
        super().settle(replica)

    def die(self, replica: Replica) -> None:
        self.deaths += 1
        self.kill_worker(replica)
        self._starting.append(self.now + self._load_ticks)

    def on(self, most: int = LONGEST) -> None:
        """Run until all is done."""
        for _ in range(most):
            if not self.live():
                break
            self.step()
        assert not self.live(), "not done"
        assert not self.core.suspects.requests
        assert all(replica.reserved_for is None for replica in self.core.replicas)
        while self.tick():
            pass
        self.check_outputs()
        self.check_empty()

    def step(self) -> None:
        """One tick; a worker that has loaded joins."""
        if self._starting and self._starting[0] <= self.now:
            del self._starting[0]
            self.start_worker()
        self.tick()
        for replica in self.core.replicas:
            replica.check()

    def crowd(self, size: int = 8, **params: Any) -> list[Request]:
        defaults: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        return [self.submit(prompt(9 + index, index), **(defaults | params)) for index in range(size)]

    def suspect_all(self) -> None:
        """Everybody is aboard two losses."""
        for _ in range(STRIKES):
            self.step()
            self.kill_worker(self.replica)
            self.start_worker()


def errors(simulation: Simulation) -> set[str]:
    return {s.request.rid for r in simulation.requests for s in r.sequences if s.finish_reason is FinishReason.ERROR}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 2, 7])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_query_of_death_is_failed_alone(num_workers: int, at: int, steps_in_flight: int) -> None:
    simulation = Deadly(num_workers=num_workers, num_blocks=200, steps_in_flight=steps_in_flight)
    simulation.crowd()
    simulation.deadly["r3"] = at
    simulation.on()
    assert (simulation.convicted, errors(simulation)) == (["r3"], {"r3"})
    assert STRIKES + CONVICT <= simulation.deaths <= STRIKES + CONVICT + 1
    metrics = {name: value for name, _, value in simulation.core.metrics.samples(simulation.core.replicas, 0)}
    assert metrics["headrace:requests_convicted_total"] == 1
    assert metrics["headrace:suspects"] == 0
    assert metrics["headrace:epochs_total"] == simulation.num_epochs


def test_two_queries_of_death_and_choices() -> None:
    simulation = Deadly(num_blocks=200, num_workers=2)
    simulation.crowd(n=3)
    simulation.deadly |= {"r0": 0, "r6": 3}
    simulation.on()
    assert sorted(simulation.convicted) == ["r0", "r6"]
    assert errors(simulation) == {"r0", "r6"}


@pytest.mark.parametrize("seed", range(40))
def test_innocents_survive_random_kills(seed: int) -> None:
    """Each loses a worker five times at least, at any moment. Only three turns in a row would convict."""
    rng = random.Random(seed)
    simulation = Deadly(num_workers=rng.choice([1, 2]), num_blocks=200, load_ticks=rng.randint(1, 3))
    simulation.crowd(n=rng.choice([1, 2]))
    alone: dict[str, int] = {}
    for _ in range(rng.randint(5, 12)):
        for _ in range(rng.randint(1, 5)):
            simulation.step()
        if simulation.core.replicas:
            replica = rng.choice(simulation.core.replicas)
            if replica.reserved_for is not None:
                alone[replica.reserved_for.rid] = alone.get(replica.reserved_for.rid, 0) + 1
            simulation.die(replica)
    simulation.on()
    assert all(alone[rid] >= CONVICT for rid in simulation.convicted)
    assert errors(simulation) == set(simulation.convicted)


def test_suspects_are_cleared_by_getting_on() -> None:
    simulation = Deadly(num_blocks=200)
    crowd = simulation.crowd()
    simulation.suspect_all()
    assert list(simulation.core.suspects.requests) == crowd
    turns = []
    while simulation.core.suspects.requests:
        simulation.step()
        turn = simulation.core.suspects.turn
        if turn is not None and turn not in turns:
            turns.append(turn)
    assert turns == crowd
    assert all(len(simulation.outputs[request.rid, 0]) >= CLEAR_TOKENS for request in crowd)
    assert {request.strikes for request in crowd} == {0}
    for _ in range(3):
        simulation.step()
    assert simulation.replica.num_running == 8
    simulation.on()
    assert not simulation.convicted


def test_a_loss_long_after_another_makes_no_suspect() -> None:
    simulation = Deadly(num_blocks=200)
    simulation.crowd()
    for _ in range(5):
        for _ in range(8):
            simulation.step()
        simulation.die(simulation.replica)
        assert not simulation.core.suspects.requests
        for _ in range(4):
            simulation.step()
    simulation.on()


def test_only_those_in_unsettled_steps_are_struck() -> None:
    simulation = Deadly(max_num_seqs=2, num_blocks=200)
    crowd = simulation.crowd(4)
    simulation.suspect_all()
    assert list(simulation.core.suspects.requests) == crowd[:2]
    simulation.on()


def test_the_innocent_go_first() -> None:
    """Who was lost alone waits for its next turn until the other suspects have had theirs."""
    simulation = Deadly(num_blocks=200)
    crowd = simulation.crowd()
    simulation.deadly["r2"] = 0
    while not any(request.strikes_alone for request in crowd):
        simulation.step()
    while simulation.core.suspects.turn is not crowd[2]:
        assert crowd[2].strikes_alone == 1
        simulation.step()
    assert list(simulation.core.suspects.requests) == [crowd[2]]
    simulation.on()


def test_others_go_on_on_other_replicas() -> None:
    simulation = Deadly(num_blocks=400, num_workers=3, load_ticks=1)
    crowd = simulation.crowd(12, max_tokens=100)
    simulation.deadly["r0"] = 0
    while not simulation.core.suspects.requests:
        simulation.step()
    del simulation.deadly["r0"]
    suspects = list(simulation.core.suspects.requests)
    others = [request for request in crowd if request not in suspects]
    assert crowd[0] in suspects
    assert others
    simulation.step()
    quarantine = next(replica for replica in simulation.core.replicas if replica.reserved_for is not None)
    before = sum(len(simulation.outputs[request.rid, 0]) for request in others)
    while simulation.core.suspects.requests:
        assert quarantine.reserved_for is not None, "turns change place"
        simulation.step()
    assert sum(len(simulation.outputs[request.rid, 0]) for request in others) > before
    simulation.on()
    assert not simulation.convicted


def test_a_running_replica_is_emptied_for_a_turn() -> None:
    """The second loss leaves only a replica on which others run: they wait, and go on after the turn."""
    simulation = Deadly(num_blocks=400, num_workers=3, load_ticks=LONGEST)
    simulation.crowd(9)
    simulation.step()
    victim = simulation.core.replicas[0].slots.occupied()[0].request
    simulation.deadly[victim.rid] = 0
    for _ in range(6):
        simulation.step()
        if simulation.core.suspects.requests:
            break
    assert simulation.core.suspects.requests
    last = simulation.replica
    assert len(simulation.core.replicas) == 1
    assert last.num_running
    simulation.step()
    assert last.reserved_for is not None
    assert {s.request for s in last.slots.occupied()} <= {last.reserved_for} or last.num_draining_preemptions
    del simulation.deadly[victim.rid]
    simulation.on()
    assert sum(s.num_preemptions for r in simulation.requests for s in r.sequences) > 0


def test_choices_run_together_in_quarantine() -> None:
    simulation = Deadly(num_blocks=200)
    asked, other = simulation.submit(prompt(20), n=4, max_tokens=30, ignore_eos=True), simulation.submit(prompt(9, 3))
    simulation.suspect_all()
    assert set(simulation.core.suspects.requests) == {asked, other}
    most = 0
    while simulation.core.suspects.requests:
        simulation.step()
        if simulation.core.suspects.turn is asked:
            most = max(most, simulation.replica.num_running)
    assert most == 4
    assert all(len(simulation.outputs[asked.rid, choice]) >= CLEAR_TOKENS for choice in range(4))
    simulation.on()


def test_choices_that_run_elsewhere_are_taken_back() -> None:
    simulation = Deadly(num_workers=2, max_num_seqs=1, num_blocks=200)
    asked = simulation.submit(prompt(8), n=2, max_tokens=60, ignore_eos=True)
    for _ in range(4):
        simulation.step()
    stays = simulation.core.replicas[1]
    assert [replica.num_running for replica in simulation.core.replicas] == [1, 1]
    for _ in range(STRIKES):
        simulation.kill_worker(next(replica for replica in simulation.core.replicas if replica is not stays))
        simulation.start_worker()
        assert stays.slots.decoding.any() == (asked not in simulation.core.suspects.requests)
        simulation.step()
    assert list(simulation.core.suspects.requests) == [asked]
    simulation.on()


@pytest.mark.parametrize("how", ["abort", "rest"])
def test_a_turn_is_given_up(how: str) -> None:
    simulation = Deadly(num_blocks=200)
    crowd = simulation.crowd(3)
    simulation.suspect_all()
    simulation.step()
    first, second, _ = crowd
    assert simulation.core.suspects.turn is first
    if how == "abort":
        simulation.core.end(first.sequences[0], FinishReason.ABORT)
        assert first not in simulation.core.suspects.requests
    else:
        simulation.core.rest(first.sequences[0], True)
    simulation.step()
    assert simulation.core.suspects.turn is second
    if how == "rest":
        while len(simulation.core.suspects.requests) > 1:
            simulation.step()
        for _ in range(5):
            simulation.step()
        assert simulation.core.suspects.turn is None
        assert simulation.replica.num_running == 2
        simulation.core.rest(first.sequences[0], False)
        simulation.step()
        assert simulation.core.suspects.turn is first
    simulation.on()
    assert not simulation.convicted


def test_a_turn_moves_from_a_replica_that_leaves() -> None:
    simulation = Deadly(num_blocks=200)
    crowd = simulation.crowd(3)
    simulation.suspect_all()
    simulation.replica.leaving = True
    simulation.plan()
    assert simulation.core.suspects.turn is None
    simulation.start_worker()
    simulation.step()
    assert simulation.core.suspects.turn is crowd[0]
    simulation.core.replicas[-1].leaving = True
    for _ in range(3):
        simulation.step()
    simulation.start_worker()
    simulation.on()
    assert not simulation.convicted


def test_without_suspects_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(Suspects, "update", never)
    monkeypatch.setattr(Suspects, "admissible", never)
    simulation = Deadly(num_workers=2)
    simulation.crowd()
    for _ in range(5):
        simulation.step()
    simulation.die(simulation.replica)
    simulation.on()


def test_a_query_of_death_in_a_real_loop(tmp_path: Path) -> None:
    """A failure that the worker tells of counts as its end does."""
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers, num_blocks=200) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        worker.deadly = "r3"
        requests = [front.submit(prompt(9 + index, index), max_tokens=40) for index in range(8)]
        front.wait_over()
        for request in requests:
            if request.rid != "r3":
                check(request)
        end = requests[3].logs[0].end
        assert end is not None
        assert end.error is not None
        assert end.error.code == ErrorCode.POISON
        assert len(worker.epochs) == 1 + STRIKES + CONVICT
        front.wait(lambda: front.metric("headrace:requests_convicted_total") == 1)
        check_at_rest(engine)


# -- mutants ---------------------------------------------------------------------------------------------------------


class LetsOthersIn(Suspects):
    def admissible(self, replica: Replica, waiting: Any) -> Any:
        return iter(waiting)


class EmptiesNothing(Suspects):
    """A turn begins beside those who run."""

    def admissible(self, replica: Replica, waiting: Any) -> Any:
        turn = replica.reserved_for
        return (s for s in waiting if (s.request is turn if turn is not None else s.request not in self.requests))

    def _begin_turn(self, replicas: Any) -> None:
        super()._begin_turn([replica for replica in replicas if not replica.num_running])
        if self._replica is None and replicas and self.requests:
            self._replica = replicas[0]
            self._replica.reserved_for = next(iter(self.requests))


class KeepsTheTurnOfTheAborted(Suspects):
    def forget(self, request: Request) -> None:
        self.requests.pop(request, None)


class NeverClears(Suspects):
    def update(self, replicas: Any) -> None:
        turn = self.turn
        for sequence in () if turn is None else turn.sequences:
            sequence.struck_at = 10_000
        super().update(replicas)


class ConvictsWhoeverIsAboard(Suspects):
    def struck(self, aboard: Any, lost: Replica, running: Any) -> Request | None:
        sequences = list(aboard)
        found = super().struck(sequences, lost, running)
        return found or next((s.request for s in sequences if s.request.strikes > STRIKES), None)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (LetsOthersIn, test_suspects_are_cleared_by_getting_on),
        (EmptiesNothing, test_a_running_replica_is_emptied_for_a_turn),
        (KeepsTheTurnOfTheAborted, lambda: test_a_turn_is_given_up("abort")),
        (NeverClears, test_suspects_are_cleared_by_getting_on),
        (ConvictsWhoeverIsAboard, lambda: [test_innocents_survive_random_kills(seed) for seed in range(40)]),
    ],
)
def test_mutants_are_caught(mutant: type[Suspects], test: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "Suspects", mutant)
    with pytest.raises(AssertionError):
        test()


def test_messages_lost_on_their_way_are_nobodys_fault() -> None:
    simulation = Simulation()
    request = simulation.submit(prompt(9), max_tokens=20, ignore_eos=True)
    for _ in range(STRIKES + CONVICT):
        simulation.plan()
        simulation.kill_worker(simulation.replica, blames=False)
        simulation.start_worker()
    assert (request.strikes, len(simulation.core.suspects.requests)) == (0, 0)
    simulation.run()
    simulation.check_outputs()
