"""Scheduling policies: their order against plain ones, who starves under each (nobody), who has to give way."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_engine import fair_queue, prefix_queue
from core_engine.queues import QUEUES
from core_engine.request import Request, Sequence
from shared.messages import FinishReason
from shared.sampling import SamplingParams
from tests.core_engine.simulation import VOCAB, Simulation
from tests.core_engine.test_beam_search import check


def sequence(order: int, priority: int = 0, tenant: str = "", at: float = 0.0, length: int = 3) -> Sequence:
    prompt = np.arange(length, dtype=np.int32)
    request = Request(
        f"r{order}", SamplingParams(), prompt, order, at, frozenset(), priority=priority, tenant=tenant
    )  # fmt: skip
    return Sequence(request, 0, np.empty(0, np.int32), length + 10)


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(sorted(QUEUES)), seed=st.integers(0, 2**32))
def test_each_waits_once(policy: str, seed: int) -> None:
    """Whatever comes, goes, is preempted and gets tokens: all that wait are there, and in order."""
    rng = random.Random(seed)
    queue = QUEUES[policy](7.0)
    waiting: set[Sequence] = set()
    outside: list[Sequence] = []
    for order in range(200):
        action = rng.random()
        if action < 0.45:
            new = sequence(order, rng.randrange(3), rng.choice("abcd"), float(order), rng.choice([1, 100, 900]))
            queue.push(new)
            waiting.add(new)
        elif action < 0.7 and waiting:
            first = next(iter(queue))
            queue.admit(first, rng.randrange(len(first.tokens)))
            waiting.remove(first)
            outside.append(first)
        elif action < 0.8 and waiting:
            gone = rng.choice(sorted(waiting, key=lambda each: each.arrival))
            queue.remove(gone)
            waiting.remove(gone)
            with pytest.raises(KeyError):
                queue.remove(gone)
        elif action < 0.9 and outside:
            back = outside.pop(rng.randrange(len(outside)))
            back.num_preemptions += 1
            queue.push(back)
            waiting.add(back)
        else:
            queue.served(outside)
        listed = list(queue)
        assert len(listed) == len(queue) == len(waiting)
        assert set(listed) == waiting
        assert queue.num_prompt_tokens == sum(each.prompt_len for each in waiting)
        _check_order(policy, listed)


def _check_order(policy: str, listed: list[Sequence]) -> None:
    if policy == "priority":
        assert listed == sorted(
            listed, key=lambda each: (each.request.arrived_at + 7 * each.request.priority, each.arrival)
        )
    elif policy == "fair":
        for tenant in "abcd":
            own = [each.arrival for each in listed if each.request.tenant == tenant]
            assert own == sorted(own)
    else:
        assert listed == sorted(listed, key=lambda each: each.arrival)


# -- priority ----------------------------------------------------------------------------------------------------------


def flood(simulation: Simulation, ticks: int, *, rng: random.Random, **fields: Any) -> None:
    """More than the engine can do, for so long."""
    for _ in range(ticks):
        simulation.submit([rng.randrange(VOCAB) for _ in range(8)], max_tokens=4, ignore_eos=True, **fields)
        simulation.tick()
        for replica in simulation.core.replicas:
            replica.check()


def test_the_lowest_priority_ends_within_its_bound() -> None:
    """It yields to what arrives in the first 3 x 20 s; half as much comes as could be done in twice the time."""
    rng = random.Random(1)
    simulation = Simulation(policy="priority", priority_ageing_s=20.0, max_num_seqs=2)
    low = simulation.submit(list(range(8)), max_tokens=12, ignore_eos=True, priority=3).sequences[0]
    flood(simulation, 400, rng=rng)
    assert low.ended_at is not None
    others = [each.sequences[0] for each in simulation.requests[1:]]
    before = [each for each in others if each.request.arrived_at < 60.0]
    assert low.ended_at <= max(each.ended_at or np.inf for each in before) + 60.0
    assert low.num_preemptions <= len(before)
    assert any(each.scheduled_at is None for each in others), "no flood"
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_a_higher_priority_takes_a_seat() -> None:
    simulation = Simulation(policy="priority", max_num_seqs=2)
    lows = [simulation.submit([n, 5, 7], max_tokens=60, ignore_eos=True, priority=1 + n).sequences[0] for n in range(2)]
    for _ in range(4):
        simulation.tick()
    same = simulation.submit([9, 9], max_tokens=4, ignore_eos=True, priority=2).sequences[0]
    high = simulation.submit([8, 8], max_tokens=4, ignore_eos=True).sequences[0]
    for _ in range(10):
        simulation.tick()
    assert [each.num_preemptions for each in lows] == [0, 1], "the lowest one has to go, and only that"
    assert high.ended_at is not None
    assert same.scheduled_at is None or lows[1].scheduled_at is not None
    assert simulation.core.metrics.priority_preemptions.value == simulation.core.metrics.preemptions.value == 1
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_a_higher_priority_takes_blocks() -> None:
    simulation = Simulation(20, policy="priority", enable_prefix_caching=False)
    low = simulation.submit(list(range(40)), max_tokens=20, ignore_eos=True, priority=1).sequences[0]
    for _ in range(3):
        simulation.tick()
    high = simulation.submit(list(range(40, 80)), max_tokens=4, ignore_eos=True).sequences[0]
    simulation.run()
    assert high.num_preemptions == 0
    assert low.num_preemptions >= 1
    assert high.ended_at is not None
    assert low.ended_at is not None
    assert high.ended_at < low.ended_at
    simulation.check_outputs()
    simulation.check_empty()


def test_a_search_gives_way_and_takes_its_seats() -> None:
    """Beams go together and give back the seats of all; a search that comes needs as many, or nobody goes for it."""
    simulation = Simulation(200, policy="priority", max_num_seqs=6)
    low = simulation.submit([1, 2, 3], priority=2, beam_width=4, n=4, temperature=0.0, max_tokens=30, ignore_eos=True)
    rows = [simulation.submit([n, 7], priority=1, max_tokens=40, ignore_eos=True) for n in range(2)]
    for _ in range(5):
        simulation.tick()
    assert simulation.replica.num_active == 6
    high = simulation.submit([4, 4], max_tokens=8, ignore_eos=True)
    for _ in range(6):
        simulation.tick()
    assert [each.sequences[0].num_preemptions for each in (low, *rows)] == [1, 0, 0]
    assert high.sequences[0].scheduled_at is not None
    assert simulation.core.metrics.preemptions.value == 1
    wide = simulation.submit([5, 5], priority=1, beam_width=5, n=1, temperature=0.0, max_tokens=8, ignore_eos=True)
    for _ in range(3):
        simulation.tick()
    assert not any(each.sequences[0].num_preemptions for each in rows), "their seats are not enough, and not lower"
    simulation.run()
    for request in (low, wide):
        assert request.finished
        check(simulation, request)
    simulation.check_outputs()
    simulation.check_empty()


def test_a_stream_of_higher_priorities_is_served_as_it_comes() -> None:
    """One comes in each step, and somebody has to go for it: each has its place soon, and few seats are empty."""
    simulation = Simulation(400, policy="priority", max_num_seqs=12, priority_ageing_s=1000.0)
    for n in range(24):
        simulation.submit([n, 3], priority=100, max_tokens=80, ignore_eos=True)
    for _ in range(5):
        simulation.tick()
    highs = []
    for number in range(40):
        highs.append(simulation.submit([number, 1, 2], max_tokens=4, ignore_eos=True).sequences[0])
        simulation.tick()
        assert simulation.replica.num_active >= 6
    for each in highs[:30]:
        assert each.scheduled_at is not None
        assert each.scheduled_at - each.request.arrived_at <= 6.0
    assert not any(each.num_preemptions for each in highs)
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 6])
def test_who_had_to_give_way_may_be_out_of_time(ticks: int) -> None:
    """It ends while it drains, while it waits, or later: once, and whoever made it go goes on."""
    simulation = Simulation(60, policy="priority", max_num_seqs=1)
    low = simulation.submit([1, 2, 3], priority=1, max_tokens=50, ignore_eos=True).sequences[0]
    for _ in range(4):
        simulation.tick()
    high = simulation.submit([4, 5, 6], max_tokens=12, ignore_eos=True).sequences[0]
    simulation.plan()
    simulation.settle()
    simulation.plan()
    assert simulation.core.metrics.priority_preemptions.value == 1
    for _ in range(ticks):
        simulation.tick()
    simulation.core.end(low, FinishReason.ABORT)
    assert low not in simulation.core.waiting
    simulation.run()
    assert high.num_preemptions == 0
    simulation.check_outputs()
    simulation.check_empty()


def test_priority_over_two_replicas() -> None:
    """Who comes takes a free seat of either before anybody has to go; then the lowest one of a replica has to."""
    simulation = Simulation(100, policy="priority", num_workers=2, max_num_seqs=2, priority_ageing_s=1000.0)
    lows = [simulation.submit([n, 5, 7], max_tokens=60, ignore_eos=True, priority=2 + n) for n in range(3)]
    for _ in range(4):
        simulation.tick()
    first = simulation.submit([8, 8], max_tokens=50, ignore_eos=True, priority=1)
    for _ in range(4):
        simulation.tick()
    assert first.sequences[0].scheduled_at is not None
    assert simulation.core.metrics.preemptions.value == 0, "there was a free seat"
    highs = [simulation.submit([9, n], max_tokens=10, ignore_eos=True) for n in range(3)]
    for _ in range(24):
        simulation.tick()
    assert [each.sequences[0].num_preemptions for each in (*lows, first, *highs)] == [1, 1, 1, 0, 0, 0, 0]
    assert all(each.sequences[0].ended_at is not None for each in highs)
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


# -- fair --------------------------------------------------------------------------------------------------------------


def test_tenants_get_equal_shares() -> None:
    """Long prompts, long outputs, and many small ones: at no time is one further ahead than ``fair_queue`` says."""
    rng = random.Random(2)
    simulation = Simulation(1000, policy="fair", max_num_seqs=8, max_num_queued_reqs=10**6, enable_prefix_caching=False)
    shapes = {"a": (60, 2), "b": (4, 40), "c": (8, 8)}
    for tenant, (prompt, output) in shapes.items():
        for _ in range(400):
            ids = [rng.randrange(VOCAB) for _ in range(prompt)]
            simulation.submit(ids, tenant=tenant, max_tokens=output, ignore_eos=True)
    most = dict.fromkeys(shapes, 0)
    for tick in range(1200):
        simulation.tick()
        if tick % 10:
            continue
        tokens = _tokens_by_tenant(simulation)
        for tenant, (prompt, output) in shapes.items():
            ahead = tokens[tenant] - min(tokens.values())
            assert ahead < fair_queue.QUANTUM + prompt + 8 * output
            most[tenant] = max(most[tenant], ahead)
    assert {each.request.tenant for each in simulation.core.waiting} == set(shapes)
    assert min(tokens.values()) > 3000
    assert max(most.values()) > fair_queue.QUANTUM / 2, "the bound is far from what happens"
    assert simulation.core.metrics.preemptions.value == 0


def _tokens_by_tenant(simulation: Simulation) -> Counter[str]:
    """Prompt tokens of requests that were started, and output tokens."""
    tokens: Counter[str] = Counter()
    for request in simulation.requests:
        if request.sequences[0].scheduled_at is not None:
            tokens[request.tenant] += len(request.prompt) + len(simulation.outputs[request.rid, 0])
    return tokens


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_who_comes_waits_for_one_round(seed: int) -> None:
    """Before a newcomer's first request every other tenant starts less than a quantum, and one request."""
    rng = random.Random(seed)
    queue = QUEUES["fair"]()
    orders = iter(range(10**6))
    running: list[Sequence] = []
    for _ in range(200):
        queue.push(sequence(next(orders), tenant=rng.choice("abcde"), length=rng.choice([1, 30, 700])))
    for _ in range(rng.randrange(100)):
        running.append(next(iter(queue)))
        queue.admit(running[-1], rng.randrange(len(running[-1].tokens)))
        queue.served(rng.choices(running, k=rng.randrange(20)))
    queue.push(sequence(next(orders), tenant="late", length=5))
    started: dict[str, list[int]] = {}
    while (first := next(iter(queue))).request.tenant != "late":
        started.setdefault(first.request.tenant, []).append(len(first.tokens))
        queue.admit(first, 0)
        if rng.random() < 0.5:
            queue.push(sequence(next(orders), tenant=first.request.tenant, length=rng.choice([1, 30, 700])))
    assert all(sum(lengths[:-1]) < fair_queue.QUANTUM for lengths in started.values()), started


def test_an_idle_tenant_gathers_no_credit() -> None:
    queue = QUEUES["fair"]()
    queue.push(sequence(0, tenant="late", length=10))
    for order in range(1, 200):
        queue.push(sequence(order, tenant="busy", length=100))
    while len(queue) > 100:
        queue.admit(next(iter(queue)), 0)
    for order in range(200, 300):
        queue.push(sequence(order, tenant="late", length=100))
    first = [each.request.tenant for each in list(queue)[:24]]
    assert 8 <= first.count("busy") <= 16


# -- longest prefix first ----------------------------------------------------------------------------------------------


def test_cached_prefixes_go_first_but_nobody_starves() -> None:
    rng = random.Random(3)
    simulation = Simulation(400, policy="lpm", max_num_seqs=2, max_num_queued_reqs=10**6)
    shared = [rng.randrange(VOCAB) for _ in range(24)]
    simulation.submit([*shared, 1], max_tokens=2, ignore_eos=True)
    simulation.run()
    blockers = [simulation.submit([n, n], max_tokens=10, ignore_eos=True) for n in range(2)]
    simulation.tick()
    cold = simulation.submit([rng.randrange(VOCAB) for _ in range(20)], max_tokens=2, ignore_eos=True).sequences[0]
    warm = [
        simulation.submit([*shared, n % VOCAB, n // VOCAB], max_tokens=2, ignore_eos=True).sequences[0]
        for n in range(2 * prefix_queue.MOST_PASSED)
    ]
    simulation.run()
    assert all(each.finished for each in blockers)
    started = [each.scheduled_at for each in [cold, *warm]]
    assert None not in started
    passed = sum(each.scheduled_at < cold.scheduled_at for each in warm)  # type: ignore[operator]
    assert prefix_queue.MOST_PASSED - 2 <= passed <= prefix_queue.MOST_PASSED
    simulation.check_outputs()
    simulation.check_empty()


# -- limits ------------------------------------------------------------------------------------------------------------


def test_outputs_are_capped() -> None:
    simulation = Simulation(30, max_output_tokens=6)
    asked = [1, 6, 100, 200, None]
    requests = [simulation.submit([n, 50], max_tokens=most, ignore_eos=True) for n, most in enumerate(asked)]
    simulation.run()
    assert [len(simulation.outputs[each.rid, 0]) for each in requests] == [1, 6, 6, 6, 6]
    simulation.check_outputs()
