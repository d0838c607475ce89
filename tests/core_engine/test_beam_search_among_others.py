"""Beam searches beside other requests: what kills workers, who has priority, memory that is short, choices replaced."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from core_engine.request import Request
from core_engine.suspects import CONVICT, STRIKES
from shared.messages import FinishReason
from tests.core_engine.simulation import Simulation
from tests.core_engine.test_beam_search import check, search
from tests.core_engine.test_suspects import Deadly, errors, prompt


def crowd(simulation: Simulation, width: int = 3, **params: Any) -> Request:
    """A search, the fourth of eight requests."""
    defaults: dict[str, Any] = {"ignore_eos": True, "max_tokens": 12}
    for index in range(8):
        if index == 3:
            found = search(simulation, prompt(13, 50), width, rid="search", **(defaults | params))
        else:
            simulation.submit(prompt(9 + index, index), max_tokens=25, ignore_eos=True)
    return found


# -- what kills workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 2, 7, 11])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_search_that_kills_is_failed_alone(num_workers: int, at: int, steps_in_flight: int) -> None:
    """Also if it dies of a late token, which it has to find again each time."""
    simulation = Deadly(num_workers=num_workers, num_blocks=200, steps_in_flight=steps_in_flight)
    crowd(simulation)
    simulation.deadly["search"] = at
    simulation.on()
    assert (simulation.convicted, errors(simulation)) == (["search"], {"search"})
    assert simulation.deaths <= STRIKES + CONVICT + 1


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_search_beside_one_that_kills_is_acquitted(num_workers: int, at: int) -> None:
    simulation = Deadly(num_workers=num_workers, num_blocks=200)
    found = crowd(simulation)
    simulation.deadly["r5"] = at
    simulation.on()
    assert (simulation.convicted, errors(simulation)) == (["r5"], {"r5"})
    check(simulation, found)


@pytest.mark.parametrize("ticks", range(9))
def test_suspected_searches_run_alone_and_are_acquitted(ticks: int) -> None:
    simulation = Deadly(num_blocks=200)
    found = [crowd(simulation), search(simulation, prompt(30, 7), 4, max_tokens=10)]
    for _ in range(ticks):
        simulation.step()
    for _ in range(STRIKES):
        simulation.step()
        while simulation.plan() is not None:
            pass
        simulation.kill_worker(simulation.replica)
        simulation.start_worker()
    assert found[0] in simulation.core.suspects.requests
    simulation.on()
    assert not simulation.convicted
    for request in found:
        check(simulation, request)


@pytest.mark.parametrize("seed", range(12))
def test_random_deaths(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Deadly(num_workers=rng.choice([1, 2]), num_blocks=rng.choice([60, 200]), load_ticks=rng.choice([0, 4]))
    found = [crowd(simulation), search(simulation, prompt(30, 7), 4, max_tokens=10)]
    simulation.deadly["r1"] = rng.randrange(20)
    for _ in range(rng.randrange(40)):
        simulation.step()
        if rng.random() < 0.1 and simulation.core.replicas:
            simulation.die(rng.choice(simulation.core.replicas))
    simulation.on()
    assert set(simulation.convicted) <= {"r1"}
    for request in found:
        check(simulation, request)


# -- memory and seats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "lpm"])
@pytest.mark.parametrize("num_blocks", [26, 32, 44])
def test_a_search_that_is_preempted_finds_the_same(policy: str, num_blocks: int) -> None:
    simulation = Simulation(num_blocks, policy=policy)
    found = []
    for index in range(4):
        simulation.submit(prompt(11, index), max_tokens=40, ignore_eos=True, tenant=str(index))
        found.append(search(simulation, prompt(9, 20 + index), 3, ignore_eos=True, max_tokens=12, tenant="x"))
    while simulation.tick():
        simulation.replica.check()
    assert not simulation.core.waiting
    for request in found:
        check(simulation, request)
    simulation.check_outputs()
    simulation.check_empty()
    if num_blocks == 26:
        assert sum(request.search.leader.num_preemptions for request in found if request.search is not None)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_search_of_a_higher_priority_gets_the_seats_of_all_its_beams(steps_in_flight: int) -> None:
    simulation = Simulation(400, policy="priority", priority_ageing_s=1e6, steps_in_flight=steps_in_flight)
    low = [simulation.submit(prompt(9, i), max_tokens=200, ignore_eos=True, priority=2) for i in range(8)]
    for _ in range(4):
        simulation.tick()
    high = search(simulation, prompt(9, 50), 4, ignore_eos=True, max_tokens=6, priority=0)
    while high.sequences[0].finish_reason is None:
        simulation.tick()
    assert simulation.now < 20
    assert all(request.sequences[0].finish_reason is None for request in low)
    assert sum(request.sequences[0].num_preemptions for request in low) == 4
    simulation.run()
    check(simulation, high)
    simulation.check_outputs()
    simulation.check_empty()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("ticks", range(5))
def test_a_search_gives_way_to_a_higher_priority(steps_in_flight: int, ticks: int) -> None:
    simulation = Simulation(400, policy="priority", priority_ageing_s=1e6, steps_in_flight=steps_in_flight)
    low = search(simulation, prompt(9, 50), 4, ignore_eos=True, max_tokens=40, priority=2)
    even = [simulation.submit(prompt(9, i), max_tokens=200, ignore_eos=True) for i in range(4)]
    for _ in range(ticks):
        simulation.tick()
    high = simulation.submit(prompt(9, 70), max_tokens=5, priority=0, ignore_eos=True)
    while high.sequences[0].finish_reason is None:
        simulation.tick()
    assert simulation.now < ticks + 15
    assert all(request.sequences[0].num_preemptions == 0 for request in even)
    assert low.search is not None
    assert low.search.leader.num_preemptions <= 1
    simulation.run()
    check(simulation, low)
    simulation.check_outputs()
    simulation.check_empty()


# -- what front ends do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticks", range(8))
@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_choice_that_is_replaced_is_found(ticks: int, rests: bool, n: int) -> None:
    """A re-submission brought other rows for the first choice, as ``FrontendLink.replaced`` has it."""
    simulation = Simulation(200)
    request = search(simulation, prompt(14), 3, n=n, ignore_eos=True, max_tokens=6)
    for _ in range(ticks):
        simulation.tick()
    core, old = simulation.core, request.sequences[0]
    done = old.finish_reason is not None
    if rests:
        for sequence in request.sequences:
            core.rest(sequence, True)
    if not done:
        [new] = core.submit(request, {0: np.empty(0, np.int32)}, bounded=False)
        core.end(old, FinishReason.ABORT)
    if rests:
        for sequence in request.sequences:
            core.rest(sequence, False)
    simulation.run()
    assert done or new.finish_reason is FinishReason.LENGTH
    request.sequences = [each for each in request.sequences if each is not old or done]
    check(simulation, request)
    simulation.check_empty()


@pytest.mark.parametrize("ticks", range(8))
def test_a_search_rests_with_its_choices(ticks: int) -> None:
    """Also if the choice that it began with is no longer wanted."""
    simulation = Simulation(200)
    request = search(simulation, prompt(14), 3, ignore_eos=True, max_tokens=6)
    for _ in range(ticks):
        simulation.tick()
    simulation.core.end(request.sequences[0], FinishReason.ABORT)
    for sequence in request.sequences:
        simulation.core.rest(sequence, True)
    while simulation.tick():
        pass
    assert simulation.replica.num_running == 0
    assert simulation.replica.kv.pool.num_held == 0
    for sequence in request.sequences:
        simulation.core.rest(sequence, False)
    simulation.run()
    assert all(sequence.finish_reason is not None for sequence in request.sequences)
    if ticks < 7:
        check(simulation, request)
    simulation.check_empty()
