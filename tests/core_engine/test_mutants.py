"""The simulation is worth something: it catches an engine that breaks one of its rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from core_engine import core as core_module
from core_engine import host_memory as host_memory_module
from core_engine.block import Block, HostBlock
from core_engine.core import EngineCore
from core_engine.host_memory import HostMemory, Outgoing
from core_engine.host_pool import HostPool
from core_engine.kv_cache_manager import KVCacheManager
from core_engine.replica import Replica
from core_engine.request import Exit, Sequence
from core_engine.transfers import Transfer, Transfers
from shared.errors import RequestError
from shared.messages import Epoch, FinishReason
from tests.core_engine.simulation import Corrupt, Simulation
from tests.core_engine.test_schedules import drive


def fails(simulation: Simulation, seed: int) -> bool:
    try:
        drive(simulation, seed)
    except (AssertionError, IndexError, ValueError, KeyError):
        return True
    return False


class ReleasesEarly(Replica):
    """Blocks and slot go back at once, whatever is in flight."""

    def request_exit(self, sequence: Sequence, exit: Exit) -> None:
        slot = sequence.slot
        super().request_exit(sequence, exit)
        if slot is not None and sequence.slot is not None and sequence.exit is not None:
            self.kv.release(sequence)


def test_early_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "Replica", ReleasesEarly)
    assert sum(fails(Simulation(20, steps_in_flight=2), seed) for seed in range(5)) >= 3


class KeepsThePrefixMap(EngineCore):
    """The block pool outlives the worker that its blocks were on."""

    old: KVCacheManager | None = None

    def begin_epoch(self, name: str, epoch: Epoch, num_blocks: int) -> list[tuple[Sequence, RequestError]]:
        refused = super().begin_epoch(name, epoch, num_blocks)
        replica = self.replicas[-1]
        replica.kv = self.old or replica.kv
        self.old = replica.kv
        return refused


def test_prefix_map_kept_across_a_restart() -> None:
    simulation = Simulation(core=KeepsThePrefixMap)
    simulation.submit(list(range(20)), max_tokens=2)
    simulation.run()
    simulation.restart_worker()
    simulation.submit(list(range(20)), max_tokens=2)
    with pytest.raises(Corrupt):
        simulation.run()
    assert any(fails(Simulation(core=KeepsThePrefixMap), seed) for seed in range(5))


def preemptions_beside_an_abort() -> int:
    """Two sequences fill the cache; one is aborted while a step names it, just before the other needs a block."""
    simulation = Simulation(9, block_size=4, steps_in_flight=2)
    simulation.core.scheduler.admission.expected_ratio = 0.1
    leaving = simulation.submit(list(range(14)), max_tokens=18, ignore_eos=True)
    simulation.submit(list(range(50, 64)), max_tokens=18, ignore_eos=True)
    simulation.plan()
    simulation.plan()
    simulation.settle()
    simulation.plan()
    simulation.settle()
    assert simulation.replica.kv.pool.num_free == 0
    assert (simulation.replica.slots.num_computed[:2] == 16).all()
    simulation.core.end(leaving.sequences[0], FinishReason.ABORT)
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()
    return sum(len(record.preempted) for record in simulation.records)


class CountsNoPromises(KVCacheManager):
    def promised(self, leaving: Iterable[Sequence]) -> int:
        return 0


def test_promised_blocks_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preemptions_beside_an_abort() == 0
    monkeypatch.setattr(core_module, "KVCacheManager", CountsNoPromises)
    assert preemptions_beside_an_abort() == 1


class MatchesTheLastToken(KVCacheManager):
    """A whole prompt may be cached: nothing is left to compute."""

    def match(self, sequence: Sequence) -> list[Block]:
        tokens = sequence.tokens
        sequence.tokens = tokens.repeat(2)
        sequence.tokens[: len(tokens)] = tokens
        hits = super().match(sequence)[: len(tokens) // self.block_size]
        sequence.tokens = tokens
        del sequence.digests[len(tokens) // self.block_size :]
        return hits


def test_whole_prompt_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "KVCacheManager", MatchesTheLastToken)
    simulation = Simulation()
    simulation.submit(list(range(16)), max_tokens=2, ignore_eos=True)
    simulation.run()
    simulation.submit(list(range(16)), max_tokens=2)
    with pytest.raises(AssertionError):
        simulation.run()


def test_union_over_shared_blocks() -> None:
    """Two sequences that share a prefix promise it once, and not at all while a third one stays."""
    simulation = Simulation(20)
    simulation.submit(list(range(8)), max_tokens=1)
    simulation.run()
    three = [simulation.submit(list(range(9)), max_tokens=9, ignore_eos=True).sequences[0] for _ in range(3)]
    simulation.plan()
    kv = simulation.replica.kv
    assert [sequence.cached_tokens for sequence in three] == [8, 8, 8]
    assert kv.promised(three[:2]) == 2
    assert kv.promised(three) == 2 + 3
    simulation.run()
    simulation.check_empty()


# -- blocks in host memory ---------------------------------------------------------------------------------------------


class HoldsNothing(Outgoing):
    """Blocks may be reused while they are copied to the host."""

    def __init__(self, host: HostMemory, pairs: list[tuple[Block, HostBlock]], table: list[Block]) -> None:
        super().__init__(host, pairs, [])


class TakesSentForDone(Transfers):
    """Copies are used before they are complete."""

    def reported(self, transferred: int, *, last: int) -> list[Transfer]:
        return super().reported(last, last=last)


class ReusesInFlight(HostPool):
    """A block of the host is given away again while it is copied."""

    def take(self, block: Block) -> HostBlock | None:
        taken = super().take(block)
        if taken is not None:
            self._free.insert(0, taken.id)
        return taken

    def _end(self, host: HostBlock) -> None:
        super()._end(host)
        self._free.remove(host.id)

    def check(self) -> None:
        """Nothing is noticed here."""

    @property
    def num_held(self) -> int:
        return 0


class KeepsNoGeneration(HostPool):
    """What comes back from the host may be cached, although it was forgotten meanwhile."""

    def take(self, block: Block) -> HostBlock | None:
        taken = super().take(block)
        if taken is not None:
            taken.generation = 1
        return taken


def swapped_and_tiered(**options: Any) -> Simulation:
    defaults = {"num_host_blocks": 10, "swap_space": 1.0, "kv_offloading_size": 1.0, "preemption_mode": "swap"}
    return Simulation(15, max_num_batched_tokens=16, **(defaults | options))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("Outgoing", HoldsNothing), ("Transfers", TakesSentForDone), ("HostPool", ReusesInFlight)],
)
def test_transfers(monkeypatch: pytest.MonkeyPatch, name: str, mutant: type) -> None:
    assert not any(fails(swapped_and_tiered(), seed) for seed in range(4))
    monkeypatch.setattr(host_memory_module, name, mutant)
    if mutant is ReusesInFlight:
        monkeypatch.setattr(HostMemory, "check", lambda self: None)
    assert sum(fails(swapped_and_tiered(), seed) for seed in range(4)) >= 2


def hits_after_a_reset() -> int:
    """A sequence is swapped out, everything is forgotten, it comes back, and then somebody asks for the same."""
    simulation = swapped_and_tiered(num_host_blocks=40, kv_offloading_size=0.0)
    for first in (0, 40):
        simulation.submit(list(range(first, first + 20)), max_tokens=32, ignore_eos=True)
    while not any(sequence.swapped for sequence in simulation.live()):
        simulation.tick()
    simulation.core.reset_prefix_cache()
    simulation.run()
    again = simulation.submit(list(range(40, 60)), max_tokens=1).sequences[0]
    simulation.run()
    simulation.check_outputs()
    assert again.cached_tokens is not None
    return again.cached_tokens


def test_a_reset_is_not_outlived_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hits_after_a_reset() == 0
    monkeypatch.setattr(host_memory_module, "HostPool", KeepsNoGeneration)
    assert hits_after_a_reset() > 0
