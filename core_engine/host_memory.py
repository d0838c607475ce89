"""KV blocks in the host memory of one worker: what was swapped out, and the second tier of the prefix cache.

Only full blocks are copied, which nobody writes to any more. A sequence that comes back computes the rest of its
tokens, fewer than a block of them, with the row that it needs anyway.

    swap    a preempted sequence leaves: blocks that are its alone are copied, and it holds the copies until it starts
    tier    a cached block is released by its last holder: it is copied, and the copy is found by its name

A block is not copied twice. Whatever holds a block of a table here holds all blocks before it as well, so that a prefix
outlives its extensions (``core_engine.block_pool``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from core_engine.block import Block, HostBlock
from core_engine.host_loads import Continuation, Load
from core_engine.host_pool import HostPool
from core_engine.metrics import EngineMetrics
from core_engine.request import Request, Sequence
from core_engine.transfer_costs import TransferCosts
from core_engine.transfers import TO_DEVICE, TO_HOST, Transfer, Transfers
from shared.messages import Ready

if TYPE_CHECKING:
    from core_engine.kv_cache_manager import KVCacheManager


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemorySpec:
    """What a worker has, as it says in ``Ready``."""

    num_blocks: int
    block_bytes: int
    rates: tuple[float, float] = (0.0, 0.0)
    """Bytes per second to the host and to the device; 0: not known."""


def host_memory_of(ready: Ready) -> HostMemorySpec | None:
    """None: the worker has none."""
    if not ready.num_host_blocks:
        return None
    return HostMemorySpec(ready.num_host_blocks, ready.block_bytes, ready.transfer_rates)


class Swapped:
    """What a preempted sequence holds in host memory: copies by their place in its block table."""

    def __init__(self, host: HostMemory, copies: dict[int, HostBlock]) -> None:
        self.host = host
        self.copies = copies

    def release(self) -> None:
        for copy in reversed(self.copies.values()):
            self.host.pool.release_swapped(copy)


class Outgoing(Transfer):
    """Copies to the host. It holds the block table up to the last block that is copied."""

    direction = TO_HOST

    def __init__(self, host: HostMemory, pairs: list[tuple[Block, HostBlock]], table: list[Block]) -> None:
        super().__init__(pairs)
        self._host = host
        self._table = table
        for block in table:
            host.kv.pool.hold(block, is_hit=False)

    @property
    def leaving(self) -> list[Block]:
        return self._table

    def completed(self) -> None:
        for _, copy in self.pairs:
            copy.is_ready = True
        for _, copy in reversed(self.pairs):
            self._host.pool.release(copy)
        self._host.release(self._table)


class HostMemory:
    """The pool in host memory of one worker in one epoch, what is copied there and back, and who waits for it.

    Args:
        mode: what becomes of preempted sequences: ``swap``, ``recompute``, or ``auto``, whichever is faster.
    """

    def __init__(
        self, kv: KVCacheManager, pool: HostPool, costs: TransferCosts, mode: str, metrics: EngineMetrics
    ) -> None:
        self.kv = kv
        self.pool = pool
        self.transfers = Transfers()
        self.loads: dict[Sequence, Load] = {}
        """Of waiting sequences, complete or not, in the order in which they began."""
        self._swapped: dict[Sequence, None] = {}
        self._costs = costs
        self._mode = mode
        self._metrics = metrics

    # -- to the host -----------------------------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence, num_tokens: int, num_computed: int) -> None:
        """Keep what a preempted sequence, whose blocks are about to be released, would have to compute again.

        Args:
            num_computed: tokens of its ``num_tokens`` whose KV is settled.
        """
        pool, num_full = self.pool, min(num_computed, num_tokens - 1) // self.kv.block_size
        if self._mode == "recompute" or not pool.most_swapped or num_full == 0:
            return
        table = sequence.blocks[:num_full]
        wanted = [index for index, block in enumerate(table) if block.ref == 1 or pool.copy_of(block) is not None]
        if not wanted or not self._pays(table, wanted):
            return
        copies: dict[int, HostBlock] = {}
        pairs: list[tuple[Block, HostBlock]] = []
        for index in wanted:
            block = table[index]
            copy = pool.copy_of(block)
            if pool.num_swapped + (copy is None or copy.num_swaps == 0) > pool.most_swapped:
                break
            if copy is None:
                if (copy := self._copy(block)) is None:
                    break
                pairs.append((block, copy))
            pool.hold_swapped(copy)
            copies[index] = copy
        if not copies:
            return
        sequence.swapped = Swapped(self, copies)
        self._swapped[sequence] = None
        self._metrics.swaps.inc()
        self._send(pairs, table)

    def release(self, blocks: list[Block]) -> None:
        """Release a block table, or the beginning of one; the tier takes what nobody else holds."""
        if self.pool.is_tier:
            self._keep(blocks)
        self.kv.pool.release(blocks)

    def _pays(self, table: list[Block], wanted: list[int]) -> bool:
        """Whether to swap rather than to compute again: both directions count."""
        if self._mode == "swap":
            return True
        num_new = sum(self.pool.copy_of(table[index]) is None for index in wanted)
        copy_s = self._costs.copy_s(num_new, TO_HOST) + self._costs.copy_s(len(wanted), TO_DEVICE)
        return copy_s < self._compute_s(wanted[0], len(table))

    def _compute_s(self, first: int, end: int) -> float:
        """Seconds of computing blocks ``first`` to ``end`` of a table."""
        size = self.kv.block_size
        return self._costs.compute_s(first * size, (end - first) * size)

    def _keep(self, blocks: list[Block]) -> None:
        device, pool = self.kv.pool, self.pool
        wanted = [
            (block, pool.copy_of(block))
            for block in blocks
            if block.ref == 1 and block.digest is not None and not device.has_copies(block)
        ]
        for _, copy in reversed(wanted):
            if copy is not None:
                pool.touch(copy)
        pairs: list[tuple[Block, HostBlock]] = []
        for block, copy in wanted:
            if copy is None:
                if pool.collides(block) or (copy := self._copy(block)) is None:
                    break
                pairs.append((block, copy))
        self._send(pairs, blocks)

    def _copy(self, block: Block) -> HostBlock | None:
        copy = self.pool.take(block)
        if copy is not None:
            block.host = copy
        return copy

    def _send(self, pairs: list[tuple[Block, HostBlock]], table: list[Block]) -> None:
        if pairs:
            last = pairs[-1][0]
            self.transfers.queue(Outgoing(self, pairs, table[: table.index(last) + 1]))
            self._metrics.blocks_to_host.inc(len(pairs))

    # -- and back --------------------------------------------------------------------------------------------------

    @property
    def num_seats(self) -> int:
        """Of those that will start when their load is complete."""
        return sum(load.num_seats for load in self.loads.values())

    def complete_loads(self) -> list[Load]:
        return [load for load in self.loads.values() if load.is_complete]

    def begin_load(self, sequence: Sequence, reserve: int) -> tuple[bool, list[Block] | None]:
        """Load what is here of a waiting sequence, if that is faster than to compute it and there is room.

        Args:
            reserve: blocks that must stay free.

        Returns:
            Whether it has to wait; else it may be admitted as it is. And what the device caches of it; None: that was
            not looked at.
        """
        if sequence.scoring or not (sequence.swapped is not None or self.pool.is_tier):
            return False, None
        kv = self.kv
        cached, found, must_wait = self._continuation(sequence)
        if must_wait or not found or not self._is_worth_it(sequence, len(cached), len(found)):
            return must_wait, cached
        num_cached = len(cached)
        num_fresh = kv.blocks_for(len(sequence.tokens)) - num_cached
        if num_fresh + sum(block.ref == 0 for block in cached) + reserve > kv.pool.num_free:
            return False, cached
        for copy in found:
            self.pool.hold(copy)
        for block in cached:
            kv.pool.hold(block, is_hit=sequence.num_preemptions == 0)
        blocks = cached + [kv.pool.take() for _ in range(num_fresh)]
        load = Load(self, sequence, blocks, num_cached, found)
        self.loads[sequence] = sequence.load = load
        self.transfers.queue(load)
        self._metrics.blocks_to_device.inc(len(found))
        return True, cached

    def num_reachable(self, sequence: Sequence, num_cached: int) -> int:
        """About how many tokens of a waiting sequence need not be computed here, given those that the device caches."""
        if sequence.scoring or not (self.pool.is_tier or self._holds(sequence)):
            return num_cached
        own, kv, is_tier = self._own_copies(sequence), self.kv, self.pool.is_tier

        def has(index: int) -> bool:
            return index in own or (is_tier and self.pool.has(kv.digest_of(sequence, index)))

        return kv.reach(sequence, num_cached // kv.block_size, has) * kv.block_size

    def drop_inadmissible(self, turn: Request | None, suspects: dict[Request, None], *, is_leaving: bool) -> None:
        """Drop the loads of those that may not start here: all but a suspect's in its turn, and suspects otherwise."""
        for sequence, load in list(self.loads.items()):
            request = sequence.request
            if is_leaving or (request in suspects if turn is None else request is not turn):
                load.drop()

    def _continuation(self, sequence: Sequence) -> Continuation:
        kv, own, is_tier = self.kv, self._own_copies(sequence), self.pool.is_tier
        cached = kv.match(sequence)
        first, end = len(cached), kv.num_matchable(sequence)
        found: list[HostBlock] = []
        names = kv.names(sequence, first) if is_tier else ()
        for index, name in itertools.zip_longest(range(first, end), names):
            copy = own.get(index)
            if copy is None and name is not None:
                copy = self.pool.find(*name)
            if copy is None:
                break
            if not copy.is_ready:
                if index in own:
                    return Continuation(cached, found, True)
                break
            found.append(copy)
        is_coming = False
        if found and self.loads and kv.enable_prefix_caching:
            digest = kv.digest_of(sequence, first)
            is_coming = any(load.copies(digest) for load in self.loads.values())
        return Continuation(cached, found, is_coming)

    def _own_copies(self, sequence: Sequence) -> dict[int, HostBlock]:
        return sequence.swapped.copies if sequence.swapped is not None and self._holds(sequence) else {}

    def _holds(self, sequence: Sequence) -> bool:
        return sequence.swapped is not None and sequence.swapped.host is self

    def _is_worth_it(self, sequence: Sequence, num_cached: int, num_found: int) -> bool:
        if self._mode == "swap" and self._holds(sequence):
            return True
        copy_s = self._costs.copy_s(num_found, TO_DEVICE)
        return copy_s <= self._compute_s(num_cached, num_cached + num_found)

    # -- results, and the end --------------------------------------------------------------------------------------

    def transferred(self, number: int, last: int) -> None:
        """The transfers of all steps up to ``number``, of ``last`` that were sent, are complete.

        Raises:
            ProtocolError: that cannot be.
        """
        for transfer in self.transfers.reported(number, last=last):
            transfer.completed()

    def leaving(self) -> list[Block]:
        """Blocks that come back when transfers are complete, once for each that holds them."""
        return [block for transfer in self.transfers for block in transfer.leaving]

    def forget(self, sequence: Sequence) -> None:
        """A sequence that was swapped out starts again, or has ended."""
        del self._swapped[sequence]

    def end(self) -> None:
        """The epoch is over: nothing of it is held any more."""
        for load in self.loads.values():
            assert load.sequence is not None
            load.sequence.load = None
        for sequence in self._swapped:
            sequence.swapped = None
        self.loads.clear()
        self._swapped.clear()

    def held(self) -> list[Block]:
        """Every block that a transfer or a load holds, once for each."""
        dropped = [each for each in self.transfers if isinstance(each, Load) and each.sequence is None]
        tables = [each.leaving for each in self.transfers if isinstance(each, Outgoing)]
        return [
            block for table in (*tables, *(load.blocks for load in (*dropped, *self.loads.values()))) for block in table
        ]

    def check(self) -> None:
        """Assert that the pool and its holders agree."""
        self.pool.check()
        holders = Counter(copy for transfer in self.transfers for _, copy in transfer.pairs)
        swapped = Counter(copy for each in self._swapped if each.swapped for copy in each.swapped.copies.values())
        holders += swapped
        assert all(copy.ref == count for copy, count in holders.items()), "a block of the host has other holders"
        assert all(copy.num_swaps == count for copy, count in swapped.items())
        assert len(holders) == self.pool.num_held, "a block of the host is held by nobody"
        assert len(swapped) == self.pool.num_swapped
        assert all(each.slot is None and each.load is load for each, load in self.loads.items())
        written = [pair for each in self.transfers if each.direction == TO_HOST for pair in each.pairs]
        assert not any(copy.is_ready for _, copy in written), "a copy is ready before it is complete"


def let_go(sequence: Sequence) -> None:
    """A sequence that does not wait any more gives back what it has in host memory, or had copied from there."""
    if sequence.load is not None:
        sequence.load.drop()
    if sequence.swapped is not None:
        swapped, sequence.swapped = sequence.swapped, None
        swapped.host.forget(sequence)
        swapped.release()


def make_host_memory(
    kv: KVCacheManager,
    spec: HostMemorySpec,
    costs: TransferCosts,
    shares: SequenceOf[float],
    mode: str,
    metrics: EngineMetrics,
) -> HostMemory:
    """Divide what a worker has.

    Args:
        shares: sizes of the swap space and of the tier, in the same unit; they need not be those of this worker.
    """
    swap, tier = shares
    is_tier = tier > 0.0 and kv.enable_prefix_caching
    most_swapped = round(spec.num_blocks * swap / (swap + tier)) if is_tier else spec.num_blocks * (swap > 0.0)
    return HostMemory(kv, HostPool(spec.num_blocks, most_swapped=most_swapped, is_tier=is_tier), costs, mode, metrics)
