"""Swap and the host tier of the prefix cache: what is copied, when it is used, and that all of it is given back."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from core_engine import host_memory as host_memory_module
from core_engine import kv_cache_manager as kv_cache_module
from core_engine.admission import Admission
from core_engine.block import Block
from core_engine.block_pool import BlockPool
from core_engine.host_loads import Load
from core_engine.host_pool import HostPool
from core_engine.step_time import CPU_COSTS, StepTimeModel
from core_engine.transfer_costs import TransferCosts
from core_engine.transfers import TO_DEVICE, TO_HOST, Transfers
from shared.errors import ProtocolError
from shared.messages import FinishReason
from tests.core_engine.simulation import VOCAB, Simulation

FAST, SLOW = 1e9, 1.0


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * position) % VOCAB for position in range(length)]


def swapping(num_blocks: int = 9, **options: Any) -> Simulation:
    """Two sequences of up to 32 tokens do not fit 8 blocks of 4."""
    defaults: dict[str, Any] = {
        "num_host_blocks": 40,
        "swap_space": 1.0,
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
    }
    simulation = Simulation(num_blocks, **(defaults | options))
    simulation.core.scheduler.admission.expected_ratio = 0.0
    return simulation


def tiered(num_blocks: int = 9, **options: Any) -> Simulation:
    return Simulation(num_blocks, **({"num_host_blocks": 40, "kv_offloading_size": 1.0} | options))


def run(simulation: Simulation) -> None:
    """To the end, checking everything at each step."""
    while simulation.tick():
        for replica in simulation.core.replicas:
            replica.check()
    assert not simulation.live()
    simulation.check_outputs()
    simulation.check_empty()


def pairs_of(simulation: Simulation, direction: int) -> list[tuple[int, int]]:
    rows = [row for step in simulation.steps for row in step.transfers.tolist()]
    return [(block, host) for found, block, host in rows if found == direction]


def until_swapped(simulation: Simulation) -> None:
    while not any(sequence.swapped for sequence in simulation.live()):
        assert simulation.tick()


# -- swap --------------------------------------------------------------------------------------------------------------


def test_a_preempted_sequence_comes_back_to_what_it_had() -> None:
    simulation = swapping()
    for first in (0, 50):
        simulation.submit(prompt(14, first), max_tokens=18, ignore_eos=True)
    run(simulation)
    metrics = simulation.core.metrics
    assert metrics.preemptions.value == metrics.swaps.value == 1
    out, back = pairs_of(simulation, TO_HOST), pairs_of(simulation, TO_DEVICE)
    assert [host for _, host in out] == [host for _, host in back]
    resumed = simulation.requests[1].sequences[0]
    assert resumed.num_preemptions == 1
    last = [init for step in simulation.steps for init in step.new if init.rid == resumed.request.rid][-1]
    assert last.num_tokens - last.start <= 4, "more than the tail was computed again"


def test_only_blocks_that_are_its_own_are_copied() -> None:
    """Four choices share the prompt by reference."""
    simulation = swapping(14, max_num_seqs=4)
    simulation.submit(prompt(16), max_tokens=20, ignore_eos=True, n=4)
    until_swapped(simulation)
    shared = {0, 1, 2, 3}
    for sequence in simulation.live():
        if sequence.swapped is not None:
            assert not shared & sequence.swapped.copies.keys()
    run(simulation)


def test_swapped_sequences_come_back_in_order() -> None:
    simulation = swapping(25, max_num_seqs=6)
    for number in range(6):
        simulation.submit(prompt(9, 11 * number), max_tokens=30, ignore_eos=True)
    run(simulation)
    assert simulation.core.metrics.swaps.value >= 2
    ended = [request.sequences[0].ended_at for request in simulation.requests]
    assert ended == sorted(ended)


@pytest.mark.parametrize(("rate", "swaps"), [(FAST, 1), (SLOW, 0)])
def test_auto_takes_what_is_faster(rate: float, swaps: int) -> None:
    simulation = swapping(preemption_mode="auto", transfer_rate=rate)
    for first in (0, 50):
        simulation.submit(prompt(14, first), max_tokens=18, ignore_eos=True)
    run(simulation)
    assert simulation.core.metrics.preemptions.value == 1
    assert simulation.core.metrics.swaps.value == swaps


def test_costs() -> None:
    costs = TransferCosts(1000, (500.0, 2000.0), StepTimeModel(CPU_COSTS))
    assert costs.copy_s(3, TO_HOST) == 6.0
    assert costs.copy_s(3, TO_DEVICE) == 1.5
    assert TransferCosts(1000, (0.0, 0.0), StepTimeModel(CPU_COSTS)).copy_s(3, TO_HOST) == 0.0
    assert costs.compute_s(0, 10) == pytest.approx(10 * CPU_COSTS.token + 50 * CPU_COSTS.pair)
    assert costs.compute_s(100, 10) > costs.compute_s(0, 10)


@pytest.mark.parametrize("num_host_blocks", [1, 2])
def test_an_exhausted_pool_takes_the_beginning(num_host_blocks: int) -> None:
    simulation = swapping(num_host_blocks=num_host_blocks)
    for first in (0, 50):
        simulation.submit(prompt(14, first), max_tokens=18, ignore_eos=True)
    until_swapped(simulation)
    swapped = simulation.requests[1].sequences[0].swapped
    assert swapped is not None
    assert list(swapped.copies) == list(range(num_host_blocks))
    run(simulation)


def test_the_share_of_swapped_blocks_is_kept() -> None:
    options = {"swap_space": 1.0, "kv_offloading_size": 3.0, "enable_prefix_caching": True, "num_host_blocks": 8}
    simulation = swapping(25, max_num_seqs=6, **options)
    host = simulation.replica.kv.host
    assert host is not None
    assert (host.pool.most_swapped, host.pool.is_tier) == (2, True)
    for number in range(6):
        simulation.submit(prompt(9, 11 * number), max_tokens=30, ignore_eos=True)
    run(simulation)  # the pool's own check bounds it


@pytest.mark.parametrize("ticks", range(12))
@pytest.mark.parametrize("what", ["abort", "rest", "restart"])
def test_at_every_stage_of_a_swap(ticks: int, what: str) -> None:
    simulation = swapping()
    for first in (0, 50):
        simulation.submit(prompt(14, first), max_tokens=18, ignore_eos=True)
    until_swapped(simulation)
    for _ in range(ticks):
        simulation.tick()
    sequence = simulation.requests[1].sequences[0]
    if what == "abort":
        simulation.core.end(sequence, FinishReason.ABORT)
        assert sequence.swapped is sequence.load is None
    elif what == "rest":
        simulation.core.rest(sequence, True)
        assert sequence.load is None
        simulation.tick()
        simulation.core.rest(sequence, False)
    else:
        simulation.restart_worker()
        assert sequence.swapped is sequence.load is None
    run(simulation)


def test_a_search_that_is_preempted_begins_again() -> None:
    simulation = swapping(24, max_num_seqs=8)
    simulation.submit(prompt(9), max_tokens=25, ignore_eos=True)
    simulation.submit(prompt(9, 1), n=2, beam_width=3, max_tokens=12, temperature=0.0)
    run(simulation)
    assert all(sequence.swapped is None for request in simulation.requests for sequence in request.sequences)


# -- the tier ----------------------------------------------------------------------------------------------------------


def test_a_prefix_that_the_device_gave_up_comes_back() -> None:
    simulation = tiered()
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(30, 1), max_tokens=1)
    run(simulation)
    again = simulation.submit(prompt(17), max_tokens=4, ignore_eos=True).sequences[0]
    assert simulation.replica.kv.num_cached(again) == 0
    run(simulation)
    assert again.cached_tokens == 16
    metrics = simulation.core.metrics
    assert metrics.host_hits.value == 16
    assert metrics.cache_hits.value == 0
    assert len(pairs_of(simulation, TO_DEVICE)) == 4


@pytest.mark.parametrize("num_gone", [0, 4, 9])
def test_a_prompt_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, num_gone: int) -> None:
    """Nine blocks that host memory has and the device has, or has the first of: planning asks for each once, whoever
    has it, and hashes it once."""
    simulation = tiered(40)
    simulation.submit(prompt(37), max_tokens=1)
    run(simulation)
    pool = simulation.replica.kv.pool
    taken = [pool.take() for _ in range(pool.num_free - 9 + num_gone)]
    pool.release(taken)
    calls = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(BlockPool, "find", counted("device", BlockPool.find))
    monkeypatch.setattr(HostPool, "find", counted("host", HostPool.find))
    monkeypatch.setattr(kv_cache_module, "block_digest", counted("hash", kv_cache_module.block_digest))
    again = simulation.submit(prompt(37), max_tokens=4, ignore_eos=True).sequences[0]
    simulation.plan()
    num_cached = 9 - num_gone
    assert calls == Counter(device=num_cached + (num_gone > 0), host=num_gone, hash=9)
    assert (again.load is None) == (num_gone == 0)
    run(simulation)
    assert again.cached_tokens == 36


def test_what_is_there_already_is_not_copied_again() -> None:
    simulation = tiered(40)
    for _ in range(3):
        simulation.submit(prompt(17), max_tokens=1)
        run(simulation)
    assert len(pairs_of(simulation, TO_HOST)) == 4
    assert not pairs_of(simulation, TO_DEVICE)


def test_one_load_serves_those_that_wait_for_the_same() -> None:
    simulation = tiered(20)
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    simulation.replica.kv.pool.forget_all()
    simulation.replica.kv.pool._generation -= 1  # as if all of it had been evicted
    for last in (1, 2, 3):
        simulation.submit([*prompt(17), last], max_tokens=3)
    run(simulation)
    assert len(pairs_of(simulation, TO_DEVICE)) == 4
    assert [request.sequences[0].cached_tokens for request in simulation.requests[1:]] == [16, 16, 16]


@pytest.mark.parametrize(("rate", "hits"), [(FAST, 16), (SLOW, 0)])
def test_a_load_has_to_be_worth_it(rate: float, hits: int) -> None:
    simulation = tiered(transfer_rate=rate)
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(30, 1), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    assert simulation.core.metrics.host_hits.value == hits


def test_reset_forgets_every_tier() -> None:
    simulation = tiered()
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(30, 1), max_tokens=1)
    run(simulation)
    host = simulation.replica.kv.host
    assert host is not None
    on_device = sum(block.digest is not None for block in simulation.replica.kv.pool._blocks)
    found = simulation.core.reset_prefix_cache()
    assert (found.num_free, found.num_held, found.num_host) == (on_device, 0, 11)
    assert host.pool.num_kept == 0
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    assert simulation.core.metrics.host_hits.value == simulation.core.metrics.cache_hits.value == 0
    assert simulation.core.reset_prefix_cache().num_host == 4


def come_back(simulation: Simulation, ticks: int, max_tokens: int) -> None:
    """A prompt that the device has lost to another one is asked for again, ``ticks`` ago."""
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(30, 1), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(17), max_tokens=max_tokens, ignore_eos=True)
    for _ in range(ticks):
        simulation.tick()


@pytest.mark.parametrize("ticks", range(8))
def test_reset_while_a_load_is_under_way(ticks: int) -> None:
    """What was copied from forgotten KV is never found."""
    simulation = tiered()
    come_back(simulation, ticks, max_tokens=8)
    simulation.core.reset_prefix_cache()
    run(simulation)
    hits = simulation.core.metrics.host_hits.value
    last = simulation.submit(prompt(17), max_tokens=1).sequences[0]
    run(simulation)
    assert simulation.core.metrics.host_hits.value == hits
    started_fresh = hits == 0
    assert last.cached_tokens == (16 if started_fresh else 0)


@pytest.mark.parametrize("ticks", range(6))
def test_a_leaving_replica_drops_its_loads(ticks: int) -> None:
    simulation = tiered(num_workers=1)
    come_back(simulation, ticks, max_tokens=3)
    simulation.replica.leaving = True
    simulation.start_worker()
    run(simulation)
    assert len(simulation.core.replicas) == 1


@pytest.mark.parametrize("ticks", range(7))
@pytest.mark.parametrize("what", ["abort", "rest", "restart"])
def test_at_every_stage_of_a_load(ticks: int, what: str) -> None:
    simulation = tiered(12)
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    simulation.submit(prompt(42, 1), max_tokens=1)
    run(simulation)
    sequences = simulation.submit(prompt(17), max_tokens=5, ignore_eos=True, n=2).sequences
    for _ in range(ticks):
        simulation.tick()
    if what == "abort":
        simulation.core.end(sequences[0], FinishReason.ABORT)
        assert sequences[0].load is None
    elif what == "rest":
        simulation.core.rest(sequences[0], True)
        assert sequences[0].load is None
        simulation.tick()
        simulation.core.rest(sequences[0], False)
    else:
        simulation.restart_worker()
        assert sequences[0].load is None
    run(simulation)


def test_an_idle_engine_is_idle() -> None:
    """Once all transfers are reported nothing more is sent."""
    simulation = tiered()
    simulation.submit(prompt(17), max_tokens=1)
    run(simulation)
    assert simulation.replica.is_idle
    assert simulation.plan() is None
    num_steps = len(simulation.steps)
    for _ in range(5):
        assert not simulation.tick()
    assert len(simulation.steps) == num_steps


def test_a_load_gives_way_to_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took all blocks that were left, and a sequence of a higher rank needs one before it is complete."""
    dropped: list[bool] = []

    class Counted(Load):
        def drop(self) -> None:
            dropped.append(self.is_complete)
            super().drop()

    monkeypatch.setattr(host_memory_module, "Load", Counted)
    monkeypatch.setattr(Admission, "reserve", lambda *_: 0)
    for seed in range(8):
        simulation = tiered(13, steps_in_flight=1)
        simulation.submit(prompt(17), max_tokens=1)
        run(simulation)
        simulation.submit(prompt(43, 1), max_tokens=1)
        run(simulation)
        simulation.worker.transfers.seed(seed)
        simulation.submit(prompt(22, 2), max_tokens=23, ignore_eos=True)
        simulation.tick()
        simulation.submit([*prompt(17), 1, 2, 3, 4], max_tokens=3, ignore_eos=True)
        run(simulation)
        assert simulation.requests[2].sequences[0].num_preemptions == 0
    assert dropped


# -- everything with everything ----------------------------------------------------------------------------------------

MATRIX = list(itertools.product([False, True], [False, True], ["swap", "recompute", "auto"], [1, 4]))


@pytest.mark.parametrize(("cached", "chunked", "mode", "n"), MATRIX)
@pytest.mark.parametrize("num_blocks", [11, 14, 20, 33])
def test_outputs_equal_the_reference(cached: bool, chunked: bool, mode: str, n: int, num_blocks: int) -> None:
    """Pools from one that just fits the longest sequence upward."""
    simulation = Simulation(
        num_blocks,
        enable_prefix_caching=cached,
        enable_chunked_prefill=chunked,
        preemption_mode=mode,
        swap_space=1.0,
        kv_offloading_size=1.0,
        num_host_blocks=16,
        transfer_rate=5e5,
        max_num_batched_tokens=8 if chunked else 64,
    )
    for number in range(8):
        length = 8 + 3 * (number % 5)
        simulation.submit(prompt(length, number % 3), max_tokens=40 - length, n=n, ignore_eos=number % 2 == 0)
    run(simulation)


# -- the parts ---------------------------------------------------------------------------------------------------------


def named(id: int, digest: bytes) -> Block:
    block = Block(id)
    block.digest, block.parent, block.ids = digest, b"parent", b"ids"
    return block


def test_the_least_recently_used_goes_first() -> None:
    pool = HostPool(3, most_swapped=0, is_tier=True)
    copies = []
    for id, digest in enumerate((b"a", b"b", b"c"), 1):
        copy = pool.take(named(id, digest))
        assert copy is not None
        copy.is_ready = True
        copies.append(copy)
    assert pool.take(named(4, b"d")) is None, "all are held"
    for copy in copies:
        pool.release(copy)
    pool.touch(copies[0])
    pool.check()
    taken = pool.take(named(4, b"d"))
    assert taken is not None
    assert taken.id == copies[1].id
    assert not copies[1].is_live
    assert [pool.has(digest) for digest in (b"a", b"b", b"c", b"d")] == [True, False, True, False]
    assert pool.find(b"a", b"parent", b"other ids") is None
    assert pool.forget_all() == (2, 1)
    pool.release(taken)
    assert (pool.num_kept, pool.num_held) == (0, 0)
    pool.check()


def test_without_a_tier_nothing_is_kept() -> None:
    pool = HostPool(2, most_swapped=2, is_tier=False)
    copy = pool.take(named(1, b"a"))
    assert copy is not None
    pool.hold_swapped(copy)
    pool.release(copy)
    assert (pool.num_swapped, pool.num_held) == (1, 1)
    pool.release_swapped(copy)
    assert (pool.num_swapped, pool.num_held, pool.num_kept) == (0, 0, 0)


def test_reports_are_cumulative() -> None:
    transfers = Transfers()
    with pytest.raises(ProtocolError):
        transfers.reported(1, last=0)
    assert transfers.reported(3, last=4) == []
    with pytest.raises(ProtocolError):
        transfers.reported(2, last=4)
