"""Where sequences go: to a cached prefix, unless others are sooner done; what that saves; nobody is left behind."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from core_engine import core as core_module
from core_engine.replica import Replica
from core_engine.request import Sequence
from core_engine.routing import TOKENS_AFTER, Router, choose
from core_engine.scheduler import SchedulerConfig
from core_engine.step_time import StepLoad
from tests.core_engine.simulation import VOCAB, Simulation
from tests.core_engine.timed_rig import VOCAB as TIMED_VOCAB
from tests.core_engine.timed_rig import TimedRig, llama_8b


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * position) % VOCAB for position in range(length)]


def two_replicas(**options: Any) -> Simulation:
    """Both have computed a prompt of 40 tokens, another one each; their steps were timed."""
    simulation = Simulation(num_workers=2, num_blocks=200, max_num_batched_tokens=256, **options)
    for index in range(2):
        simulation.submit(prompt(40, index), max_tokens=4, ignore_eos=True)
    simulation.run()
    assert [replica.cache_queries for replica in simulation.core.replicas] == [40, 40]
    return simulation


def chosen(simulation: Simulation, ids: list[int]) -> str | None:
    """The replica that a new prompt would go to; it stays in the queue."""
    sequence = simulation.submit(ids).sequences[0]
    core = simulation.core
    found = choose(sequence, core.scheduler.router.prospects(core.scheduler.config, core.clock()))
    return found and found.replica.name


def test_the_longest_cached_prefix_wins() -> None:
    simulation = two_replicas()
    assert chosen(simulation, [*prompt(40, 0), 1, 2, 3]) == "w1"
    assert chosen(simulation, [*prompt(40, 1), 1, 2, 3]) == "w2"
    assert chosen(simulation, [*prompt(16, 1), 1, 2, 3]) == "w2"
    assert chosen(simulation, [9, *prompt(40, 1)]) == "w1"


def test_an_overloaded_replica_loses() -> None:
    """A long queue of prompts at the replica that has the prefix takes longer than computing the prefix elsewhere."""
    simulation = two_replicas()
    first = simulation.core.replicas[0]
    wanted = [*prompt(40, 0), 1, 2, 3]
    first.step_time.observe(StepLoad(100, 0, 5000.0, True), 0.1)
    assert chosen(simulation, wanted) == "w1"
    for index in range(3):
        simulation.submit(prompt(200, index + 7), max_tokens=3)
    simulation.core.replicas[1].leaving = True
    simulation.plan(first)
    simulation.core.replicas[1].leaving = False
    assert first.window
    assert chosen(simulation, wanted) == "w2"


def test_a_replica_that_has_stopped_costs_more_and_more() -> None:
    simulation = two_replicas()
    simulation.submit([*prompt(40, 0), 7], max_tokens=8, ignore_eos=True)
    simulation.plan(simulation.core.replicas[0])
    assert simulation.core.replicas[0].window
    wanted = [*prompt(40, 0), 1, 2, 3]
    assert chosen(simulation, wanted) == "w1"
    simulation.now += 5.0
    assert chosen(simulation, wanted) == "w2"


def test_a_slower_worker_gets_less() -> None:
    simulation = Simulation(num_workers=2, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256)
    slow, fast = simulation.core.replicas
    for _ in range(20):
        for replica, factor in ((slow, 3.0), (fast, 1.0)):
            replica.step_time.observe(StepLoad(64, 0, 2000.0, True), 0.064 * factor)
            replica.step_time.observe(StepLoad(8, 100, 0.0, False), 0.008 * factor)
    for index in range(24):
        simulation.submit(prompt(10, index), max_tokens=30, ignore_eos=True)
    simulation.tick()
    assert slow.num_running + fast.num_running == 24
    assert 1 <= slow.num_running <= 9


def test_a_full_replica_is_waited_for_by_nobody() -> None:
    simulation = two_replicas(max_num_seqs=2)
    first, second = simulation.core.replicas
    for index in range(2):
        simulation.submit([*prompt(40, 0), index], max_tokens=50, ignore_eos=True)
    simulation.plan(first)
    assert first.num_running == 2
    late = simulation.submit([*prompt(40, 0), 5], max_tokens=50, ignore_eos=True).sequences[0]
    simulation.plan(first)
    simulation.plan(second)
    assert late in second


def test_without_room_for_its_blocks_a_replica_is_passed_over() -> None:
    simulation = Simulation(num_workers=2, num_blocks=30, max_num_seqs=8)
    first, second = simulation.core.replicas
    simulation.submit(prompt(60, 0), max_tokens=50, ignore_eos=True)
    simulation.tick()
    busy, idle = (first, second) if first.num_running else (second, first)
    idle.step_time.observe(StepLoad(64, 0, 2000.0, True), 60.0)
    late = simulation.submit(prompt(60, 1), max_tokens=50, ignore_eos=True).sequences[0]
    simulation.tick()
    assert late in idle
    assert busy.num_running == 1
    simulation.run()
    simulation.check_outputs()


def test_expected_time() -> None:
    simulation = two_replicas()
    replica = simulation.core.replicas[0]
    core, costs = simulation.core, replica.step_time.costs
    sequence = simulation.submit(prompt(50, 60)).sequences[0]
    prospect = core.scheduler.router.prospects(core.scheduler.config, core.clock())[0]
    prefill = costs.of(StepLoad(50, 0, 1250.0, True)) - costs.step
    decode = costs.of(StepLoad(1, 50, 0.0, False))
    assert prospect.expected_s(sequence, 0) == pytest.approx(prefill + (1 + TOKENS_AFTER) * decode)
    assert prospect.expected_s(sequence, 48) < prospect.expected_s(sequence, 0)
    before = prospect.expected_s(sequence, 0)
    prospect.place(sequence, 0)
    assert prospect.expected_s(sequence, 0) > before + prefill


def test_cached_tokens_are_found_by_bisection() -> None:
    simulation = two_replicas()
    kv = simulation.core.replicas[0].kv
    for length, expected in ((40, 40), (39, 36), (17, 16), (3, 0)):
        sequence = simulation.submit([*prompt(length, 0), 96]).sequences[0]
        assert kv.num_cached(sequence) == expected == len(kv.match(sequence)) * kv.block_size
    scored = simulation.submit(prompt(40, 0), prompt_logprobs=1).sequences[0]
    assert kv.num_cached(scored) == 0


def test_what_may_not_fit_does_not() -> None:
    simulation = two_replicas()
    kv = simulation.core.replicas[0].kv
    for ids in ([*prompt(40, 0), 96], prompt(41, 70), prompt(2, 80)):
        sequence = simulation.submit(ids).sequences[0]
        fits = [kv.may_fit(sequence, reserve) for reserve in range(kv.pool.num_free + 2)]
        num_fresh = kv.blocks_for(len(ids)) - kv.num_cached(sequence) // kv.block_size
        assert sum(fits) == kv.pool.num_free + 1 - num_fresh
        for reserve, fit in enumerate(fits):
            assert fit or kv.allocate(sequence, reserve=reserve) is None


# -- what it saves -----------------------------------------------------------------------------------------------------


class RoundRobin(Router):
    """The order of arrival alone says where a sequence goes."""

    def sequences_for(
        self, replica: Replica, waiting: Callable[[], Iterable[Sequence]], config: SchedulerConfig, now: float
    ) -> Iterator[Sequence]:
        index = self.replicas.index(replica)
        return iter([each for each in waiting() if each.request.order % len(self.replicas) == index])


def prefilled(rig: TimedRig, *, rate: float, seed: int = 0) -> tuple[int, float]:
    """240 questions about 8 documents of 2,048 tokens, each with 64 of its own.

    Returns:
        Prompt tokens that were computed, the median time to the first token.
    """
    rng = random.Random(seed)
    documents = [np.array([rng.randrange(TIMED_VOCAB) for _ in range(2048)], np.int32) for _ in range(8)]
    now, timed = 0.0, []
    for _ in range(240):
        now += rng.expovariate(rate)
        question = np.array([rng.randrange(TIMED_VOCAB) for _ in range(64)], np.int32)
        timed.append(rig.submit(np.concatenate([rng.choice(documents), question]), 64, now))
    rig.run()
    assert all(len(each.times) == 64 for each in timed)
    computed = sum(int(step.prefill[:, 2].sum()) for step in rig.steps)
    return computed, statistics.median(each.ttft for each in timed)


@pytest.mark.parametrize("rate", [20.0, 100.0])
def test_prefix_aware_against_round_robin(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cache holds five documents and what runs; at a low and at a high load."""
    options: dict[str, Any] = {"num_replicas": 4, "enable_prefix_caching": True, "num_blocks": 700}
    computed, ttft = prefilled(TimedRig(llama_8b, **options), rate=rate)
    with monkeypatch.context() as patch:
        patch.setattr(core_module, "Router", RoundRobin)
        computed_in_turn, ttft_in_turn = prefilled(TimedRig(llama_8b, **options), rate=rate)
    assert computed_in_turn >= 3 * computed
    assert ttft < ttft_in_turn


def test_one_hot_prefix_spreads_under_load() -> None:
    """All requests begin alike: one replica has the prefix first, but does not keep all of them."""
    rig = TimedRig(llama_8b, num_replicas=4, enable_prefix_caching=True)
    document = np.arange(2048, dtype=np.int32) % TIMED_VOCAB
    for number in range(400):
        question = np.full(32, number, np.int32)
        rig.submit(np.concatenate([document, question]), 256, number / 200)
    rig.run()
    shares = [replica.cache_queries // 2080 for replica in rig.core.replicas]
    assert sum(shares) == 400
    assert min(shares) >= 50
