"""Little memory costs time and nothing else, whatever the scheduler does; and which times and counts it tells."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import pytest

from core_engine import kv_cache_manager
from core_engine.eviction import POLICIES
from core_engine.request import Sequence
from shared.messages import FinishReason
from tests.core_engine.simulation import VOCAB, Simulation
from tests.core_engine.test_schedules import drive

PREEMPTION: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"num_host_blocks": 40, "swap_space": 1.0, "preemption_mode": "swap"},
    "tier": {"num_host_blocks": 40, "kv_offloading_size": 1.0},
}
"""What else the engine is told for each way in which a preempted sequence comes back."""

WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 96}
variants = [
    pytest.param(
        {"enable_prefix_caching": caching, "max_model_len": 96} | (WHOLE if whole else {}) | PREEMPTION[name], n
    )
    for caching in (True, False)
    for whole in (True, False)
    for name in PREEMPTION
    for n in (1, 2)
]


def finish(simulation: Simulation) -> None:
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()
    metrics, is_swapping = simulation.core.metrics, simulation.core.config.swap_space > 0.0
    assert metrics.preemptions.value > 0
    assert (metrics.swaps.value > 0) == is_swapping


@pytest.mark.parametrize(("options", "n"), variants)
def test_two_that_do_not_fit_together(options: dict[str, Any], n: int) -> None:
    """Each needs five blocks of 16 in the end, three at first, and there are six."""
    simulation = Simulation(7, block_size=16, **options)
    for first in (0, 40):
        simulation.submit([(first + token) % VOCAB for token in range(34)], n=n, max_tokens=35, ignore_eos=True)
    finish(simulation)


@pytest.mark.parametrize(("options", "n"), variants)
def test_many_with_common_prefixes(options: dict[str, Any], n: int) -> None:
    rng = random.Random(5)
    simulation = Simulation(40, max_num_seqs=16, **options)
    prefixes = [[rng.randrange(VOCAB) for _ in range(length)] for length in (9, 16, 30)]
    for index in range(64):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        simulation.submit(prefixes[index % 3] + own, n=n, max_tokens=rng.randint(5, 50), ignore_eos=index % 2 == 0)
    finish(simulation)


@pytest.mark.parametrize("preemption", ["recompute", "tier"])
@pytest.mark.parametrize("eviction", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_digests_that_collide_cost_hits_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, eviction: str, seed: int, preemption: str
) -> None:
    """A hash of eight bits: ids and parents are compared in both tiers, and a prefix outlives its extensions."""
    weak: Counter[bytes] = Counter()

    def digest(parent: bytes, ids: bytes) -> bytes:
        found = hashlib.sha256(parent + ids).digest()[:1]
        weak[found] += 1
        return found

    monkeypatch.setattr(kv_cache_manager, "block_digest", digest)
    simulation = Simulation(28, eviction=eviction, max_num_batched_tokens=16, **PREEMPTION[preemption])
    drive(simulation, seed, num_requests=120)
    assert max(weak.values()) > 1
    assert simulation.core.metrics.cache_hits.value > 0
    assert (simulation.core.metrics.host_hits.value > 0) == (preemption == "tier")


# -- times and counts --------------------------------------------------------------------------------------------------


class Watch:
    """Each scrape of an engine's metrics against the one before."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.first_tokens: Counter[Sequence] = Counter()
        self._before: dict[str, float] = {}
        simulation.core.on_first_token = lambda sequence: self.first_tokens.update([sequence])

    def scrape(self) -> dict[str, float]:
        core = self.simulation.core
        samples = core.metrics.samples(core.replicas, len(core.waiting))
        found = {f"{name} {sorted(labels.items())}": value for name, labels, value in samples}
        assert all(value >= 0 for value in found.values())
        falls = [name for name, value in found.items() if "_total" in name and value < self._before.get(name, 0.0)]
        assert not [name for name in falls if "replica" not in name]
        self._before = found
        return found

    def sum(self, name: str) -> float:
        return sum(value for each, value in self.scrape().items() if each.split(" ")[0] == name)


def turn(simulation: Simulation, watch: Watch) -> bool:
    """Some are aborted once their first token is there."""
    is_busy = simulation.tick()
    for request in simulation.requests:
        if request.order % 10 == 8 and request.sequences[0].first_token_at is not None:
            for sequence in request.sequences:
                simulation.core.end(sequence, FinishReason.ABORT)
    watch.scrape()
    return is_busy


def test_times_add_up_and_requests_are_counted_once() -> None:
    """A hundred: long prompts in chunks, preemptions, aborts before and after the first token, choices, prefix hits."""
    rng = random.Random(9)
    simulation = Simulation(48, max_num_seqs=8, max_num_batched_tokens=16, max_num_queued_reqs=1000)
    watch, common = Watch(simulation), [rng.randrange(VOCAB) for _ in range(12)]
    for index in range(100):
        length = 60 if index % 5 == 0 else rng.randint(1, 10)
        prompt = common * (index % 3 == 0) + [rng.randrange(VOCAB) for _ in range(length)]
        simulation.submit(prompt, n=2 if index % 7 == 0 else 1, max_tokens=40, ignore_eos=index % 2 == 0)
        if index % 10 == 3:
            for sequence in simulation.requests[-1].sequences:
                simulation.core.end(sequence, FinishReason.ABORT)
        for _ in range(index % 4):
            turn(simulation, watch)
    while turn(simulation, watch):
        pass
    simulation.check_outputs()
    simulation.check_empty()
    started = [request for request in simulation.requests if any(map(watch.first_tokens.get, request.sequences))]
    assert max(watch.first_tokens.values()) == 1
    assert simulation.core.metrics.preemptions.value >= 10
    reasons = Counter(request.sequences[0].finish_reason for request in simulation.requests)
    assert reasons[FinishReason.ABORT] >= 15
    assert watch.sum("vllm:request_success_total") == 100
    assert watch.sum("vllm:request_prefill_time_seconds_count") == len(started) < 100
    assert watch.sum("vllm:request_decode_time_seconds_count") == len(started)
    assert watch.sum("vllm:generation_tokens_total") == sum(map(len, simulation.outputs.values()))
    stages = [watch.sum(f"vllm:request_{stage}_time_seconds_sum") for stage in ("queue", "prefill", "decode")]
    whole = sum(max(s.ended_at or 0.0 for s in each.sequences) - each.arrived_at for each in started)
    assert sum(stages) == pytest.approx(whole)
