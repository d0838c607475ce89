"""Several replicas under one engine: they join, drain and die under load, and nobody's output tells."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_engine import core as core_module
from core_engine.replica import Replica
from core_engine.routing import Router
from core_engine.scheduler import Scheduler
from shared.messages import FinishReason
from tests.core_engine.simulation import VOCAB, Simulation
from tests.core_engine.test_schedules import drive, options


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * position) % VOCAB for position in range(length)]


def at_random(simulation: Simulation, rng: random.Random, tick: int) -> None:
    """Between none and four workers; any of them may be killed or asked to leave, until the end is near."""
    replicas = simulation.core.replicas
    if len(replicas) < 4 and rng.random() < (0.05 if replicas else 0.5):
        simulation.start_worker()
    if replicas and tick < 200 and rng.random() < 0.03:
        simulation.kill_worker(rng.choice(replicas))
    if replicas and tick < 200 and rng.random() < 0.05:
        rng.choice(replicas).leaving = True


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=options, seed=st.integers(0, 2**32), num_workers=st.integers(1, 4), lag=st.sampled_from([0.0, 0.4]))
def test_outputs_equal_the_reference(options: dict[str, Any], seed: int, num_workers: int, lag: float) -> None:
    simulation = Simulation(num_workers=num_workers, **options)
    drive(simulation, seed, num_requests=32, restarts=False, scale=at_random, lag=lag)
    assert simulation.num_epochs >= num_workers


def test_from_one_to_three_and_back() -> None:
    """64 requests; two replicas join while they run, and leave again before they end."""
    simulation = Simulation(num_blocks=400, max_num_seqs=16)
    for index in range(64):
        simulation.submit(prompt(10, index), max_tokens=60, ignore_eos=True)
    for _ in range(5):
        simulation.tick()
    first = simulation.replica
    assert first.num_running == 16
    others = [simulation.start_worker() for _ in range(2)]
    for _ in range(10):
        simulation.tick()
    assert [replica.num_running for replica in (first, *others)] == [16, 16, 16]
    for replica in others:
        replica.leaving = True
    simulation.submit(prompt(5, 1), max_tokens=3)
    for _ in range(30):
        simulation.tick()
        assert all(replica.num_running == 16 for replica in others)
    simulation.run()
    assert simulation.core.replicas == [first]
    assert not any(record.preempted for record in simulation.records)
    simulation.check_outputs()
    simulation.check_empty()


def test_a_leaving_replica_takes_nothing_even_alone() -> None:
    simulation = Simulation()
    running = simulation.submit(prompt(10), max_tokens=20, ignore_eos=True)
    simulation.tick()
    simulation.replica.leaving = True
    assert not simulation.core.is_ready
    waiting = simulation.submit(prompt(10, 1), max_tokens=4)
    while simulation.tick():
        pass
    assert running.finished
    assert not waiting.finished
    assert not simulation.core.replicas
    simulation.start_worker()
    simulation.run()
    simulation.check_outputs()


def test_sequences_of_a_killed_replica_wait_at_the_head() -> None:
    simulation = Simulation(num_workers=2, max_num_seqs=2)
    requests = [simulation.submit(prompt(8, index), max_tokens=30, ignore_eos=True) for index in range(8)]
    for _ in range(6):
        simulation.tick()
    lost = simulation.core.replicas[1]
    aboard = [sequence.request.rid for sequence in lost.slots.occupied()]
    assert len(aboard) == 2
    simulation.kill_worker(lost)
    assert [sequence.request.rid for sequence in simulation.core.waiting][:2] == sorted(aboard)
    assert all(len(sequence.tokens) > 8 for sequence in list(simulation.core.waiting)[:2])
    simulation.run()
    simulation.check_outputs()
    assert all(request.finished for request in requests)


def test_metrics_of_replicas_come_and_go_with_them() -> None:
    simulation = Simulation(num_workers=2)
    for index in range(6):
        simulation.submit(prompt(9, index), max_tokens=20, ignore_eos=True)
    for _ in range(4):
        simulation.tick()
    core = simulation.core

    def of(name: str) -> dict[str, float]:
        samples = core.metrics.samples(core.replicas, len(core.waiting))
        return {labels["replica"]: value for found, labels, value in samples if found == f"headrace:replica_{name}"}

    assert of("requests_running") == {"w1": 3, "w2": 3}
    assert of("steps_total")["w2"] == simulation.core.replicas[1].num_steps > 0
    assert of("compute_seconds_total")["w1"] > 0.0
    assert of("kv_cache_usage_perc")["w1"] > 0.0
    assert of("prefix_cache_queries_total") == {"w1": 27, "w2": 27}
    core.replicas[1].leaving = True
    assert of("leaving") == {"w1": 0, "w2": 1}
    simulation.kill_worker(core.replicas[0])
    assert set(of("steps_total")) == {"w2"}


class ForgetsWhoIsLeaving(Scheduler):
    def plan(self, replica: Replica) -> Any:
        leaving, replica.leaving = replica.leaving, False
        step = super().plan(replica)
        replica.leaving = leaving
        return step


def test_a_scheduler_that_forgets_who_is_leaving_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "Scheduler", ForgetsWhoIsLeaving)
    with pytest.raises(AssertionError):
        test_a_leaving_replica_takes_nothing_even_alone()


class LeavesAllToOthers(Router):
    def sequences_for(self, *args: Any) -> Any:
        return iter(())


def test_a_router_that_starves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "Router", LeavesAllToOthers)
    with pytest.raises(AssertionError):
        test_from_one_to_three_and_back()


@pytest.mark.parametrize("max_tokens", [40, None])
def test_who_has_too_little_memory_left_is_told(max_tokens: int | None) -> None:
    """The worker that had enough is lost; what the small one that is left holds goes on there."""
    simulation = Simulation(28, max_model_len=64)
    small, large = (
        simulation.submit([first] * 10, max_tokens=most, ignore_eos=True) for first, most in ((5, 10), (6, max_tokens))
    )
    for _ in range(4):
        simulation.tick()
    simulation.start_worker(6)
    simulation.kill_worker(simulation.replica)
    simulation.run()
    assert small.sequences[0].finish_reason is FinishReason.LENGTH
    assert large.sequences[0].finish_reason is (FinishReason.LENGTH if max_tokens is None else FinishReason.ERROR)
    assert max_tokens is not None or len(simulation.outputs[large.rid, 0]) == 10
    simulation.check_outputs()
    simulation.check_empty()


@pytest.mark.parametrize("lost", [False, True])
def test_a_search_goes_where_all_its_beams_have_room(lost: bool) -> None:
    """A smaller worker joins; the larger one takes the search back, or is lost."""
    simulation = Simulation(28, max_model_len=64)
    request = simulation.submit([5] * 10, beam_width=4, n=4, temperature=0.0, max_tokens=12, ignore_eos=True)
    for _ in range(4):
        simulation.tick()
    simulation.start_worker(12)
    for sequence in request.sequences:
        simulation.core.rest(sequence, True)
    simulation.tick()
    for sequence in request.sequences:
        simulation.core.rest(sequence, False)
    if lost:
        simulation.kill_worker(simulation.replica)
    simulation.run()
    assert {each.finish_reason for each in request.sequences} == {FinishReason.ERROR if lost else FinishReason.LENGTH}
    simulation.check_empty()


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "beam_width": 2, "temperature": 0.0}], ids=["choices", "beams"])
def test_what_rested_meanwhile_is_told_that_it_fits_nowhere(fields: dict[str, Any], is_replaced: bool) -> None:
    """The only worker with enough memory is lost while nobody reads."""
    simulation = Simulation(28, max_model_len=64)
    request = simulation.submit([5] * 10, max_tokens=30, ignore_eos=True, **fields)
    if is_replaced:
        simulation.replace(request.sequences[0], ())
    fitting = simulation.submit([6] * 10, max_tokens=5, ignore_eos=True)
    for sequence in request.sequences + fitting.sequences:
        simulation.core.rest(sequence, True)
    simulation.start_worker(9)
    simulation.kill_worker(simulation.replica)
    for sequence in request.sequences + fitting.sequences:
        simulation.core.rest(sequence, False)
    refused = simulation.core.refuse_homeless(request.sequences + fitting.sequences)
    assert {sequence.request for sequence, _ in refused} == {request}
    reasons = [sequence.finish_reason for sequence in request.sequences]
    assert reasons == [FinishReason.ABORT] * is_replaced + [FinishReason.ERROR] * 2
    simulation.fail(request)
    simulation.run()
    assert fitting.sequences[0].finish_reason is FinishReason.LENGTH
    simulation.check_empty()


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "beam_width": 2, "temperature": 0.0}], ids=["choices", "beams"])
def test_a_suspect_has_its_turn_where_there_is_memory_for_it(fields: dict[str, Any]) -> None:
    simulation = Simulation(28, max_model_len=64)
    request = simulation.submit([5] * 10, max_tokens=30, ignore_eos=True, **fields)
    simulation.tick()
    for num_blocks in (28, 28, 9):
        simulation.start_worker(num_blocks)
    for _ in range(2):
        aboard = [each for each in simulation.core.replicas if any(s.request is request for s in each.aboard())]
        simulation.plan(aboard[0])
        simulation.kill_worker(aboard[0])
        simulation.tick()
    assert simulation.core.suspects.turn is request
    simulation.run()
    assert {each.finish_reason for each in request.sequences} == {FinishReason.LENGTH}
    simulation.check_outputs()
    simulation.check_empty()
