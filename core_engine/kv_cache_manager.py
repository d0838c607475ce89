"""Block tables: which KV blocks a sequence holds, which of them it shares, which are cached for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import TYPE_CHECKING

from core_engine.block import Block
from core_engine.block_pool import BlockPool, Forgotten
from core_engine.prefix_hash import block_digest
from core_engine.request import Sequence
from shared.messages import Int32

if TYPE_CHECKING:
    from core_engine.host_memory import HostMemory


def slot_of(position: int, block_table: SequenceOf[int], block_size: int) -> int:
    """Slot mapping: where in the pool the K and V of the token at ``position`` lie, in tokens."""
    return block_table[position // block_size] * block_size + position % block_size


class KVCacheManager:
    """The KV blocks of one worker in one epoch."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, eviction: str = "lru"
    ) -> None:
        self.pool = BlockPool(num_blocks, eviction)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host: HostMemory | None = None
        """The worker's pool in host memory, if it has one."""

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return (self.pool.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def may_fit(self, sequence: Sequence, reserve: int) -> bool:
        """Whether ``allocate`` may find blocks enough, told without looking at each of them; False: it will not."""
        num_blocks, free = self.blocks_for(len(sequence.tokens)), self.pool.num_free - reserve
        return free >= num_blocks or (free > 0 and free >= num_blocks - self.num_cached(sequence) // self.block_size)

    def allocate(
        self,
        sequence: Sequence,
        *,
        reserve: int = 0,
        max_new_tokens: int | None = None,
        hits: list[Block] | None = None,
    ) -> int | None:
        """Match the cached prefix of a waiting sequence and allocate blocks for the rest of its tokens, or do nothing.

        At least one token stays to be computed, so that there are logits to sample from; where the prompt is scored all
        of them are.

        Args:
            reserve: blocks that must stay free.
            max_new_tokens: refuse if more tokens than this have to be computed.
            hits: what ``match`` finds now, if it is known already.

        Returns:
            Tokens whose KV is cached, a multiple of the block size; None: not enough free blocks, or too many tokens.
        """
        assert not sequence.blocks, f"{sequence} holds blocks already"
        num_tokens = len(sequence.tokens)
        if hits is None:
            hits = [] if sequence.scoring else self.match(sequence)
        num_cached = len(hits) * self.block_size
        if max_new_tokens is not None and num_tokens - num_cached > max_new_tokens:
            return None
        num_fresh = self.blocks_for(num_tokens) - len(hits)
        if num_fresh + sum(block.ref == 0 for block in hits) + reserve > self.pool.num_free:
            return None
        for block in hits:
            self.pool.hold(block, is_hit=sequence.num_preemptions == 0)
        sequence.blocks = hits + [self.pool.take() for _ in range(num_fresh)]
        sequence.num_hashed = len(hits)
        return num_cached

    def first_digest(self, sequence: Sequence) -> bytes | None:
        """The digest of its first block; None: it fills none, or nothing is cached."""
        if not self.enable_prefix_caching or len(sequence.tokens) <= self.block_size:
            return None
        if not sequence.digests:
            self._extend_digests(sequence, 1)
        return sequence.digests[0]

    def num_cached(self, sequence: Sequence) -> int:
        """About how many tokens of a waiting sequence ``allocate`` would find cached, a multiple of the block size.

        Found by galloping and bisection, as a cached prefix outlives its extensions: of a long prompt little more is
        hashed than is cached.
        """
        if not self.enable_prefix_caching or sequence.scoring:
            return 0
        return self.reach(sequence, 0, lambda index: self.pool.has(self.digest_of(sequence, index))) * self.block_size

    def reach(self, sequence: Sequence, first: int, has: Callable[[int], bool]) -> int:
        """The end of the run of blocks of a waiting sequence, from ``first`` on, that something has, without the one of
        its last token. What is there of a prefix outlives what extends it."""
        low, high, most = first, first, self.num_matchable(sequence)
        while high < most:
            high = min(2 * high - first + 1, most)
            if not has(high - 1):
                high -= 1
                break
            low = high
        while low < high:
            middle = (low + high) // 2
            if has(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def digest_of(self, sequence: Sequence, index: int) -> bytes:
        """The digest of a full block of a waiting sequence."""
        self._extend_digests(sequence, index + 1)
        return sequence.digests[index]

    def num_blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks that ``allocate`` would take, cached ones that nobody holds included."""
        hits = [] if sequence.scoring else self.match(sequence)
        return self.blocks_for(len(sequence.tokens)) - sum(block.ref > 0 for block in hits)

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Have ``child`` begin with the blocks of the first ``num_tokens`` tokens of ``parent``, which are its own.

        A last block that they do not fill is borrowed: the parent goes on writing into it, the child never does.
        """
        assert not child.blocks, f"{child} holds blocks already"
        child.blocks = parent.blocks[: self.blocks_for(num_tokens)]
        for block in child.blocks:
            self.pool.hold(block, is_hit=False)
        num_whole = num_tokens // self.block_size
        child.num_hashed = min(parent.num_hashed, num_whole)
        child.digests += parent.digests[len(child.digests) : num_whole]
        child.borrows = num_tokens % self.block_size != 0

    def grow(self, sequence: Sequence) -> tuple[Block, Block | None]:
        """One more block to write into for a running sequence.

        Returns:
            The block, and the one that has to be copied into it first. The latter stays held: ``pool.release`` it once
            the copy is done.

        Raises:
            IndexError: no block is free.
        """
        if not sequence.borrows:
            block, source = self.pool.take(), None
            sequence.blocks.append(block)
            return block, source
        lent = sequence.blocks[-1]
        sequence.borrows = False
        if lent.ref == 1 and lent.digest is None:
            return lent, None  # everybody else has left it
        sequence.blocks[-1] = self.pool.take()
        return sequence.blocks[-1], lent

    def commit(self, sequence: Sequence, tokens: Int32, num_settled: int) -> None:
        """Offer the blocks that the first ``num_settled`` tokens fill, KV written and settled, to the prefix map."""
        size, num_full = self.block_size, num_settled // self.block_size
        if not self.enable_prefix_caching:
            return
        for index in range(sequence.num_hashed, num_full):
            ids = tokens[index * size : (index + 1) * size].tobytes()
            block, before = sequence.blocks[index], sequence.blocks[index - 1] if index else None
            self.pool.commit(block, self._digest(sequence, index, ids), _parent(sequence, index), ids, before)
            sequence.num_hashed = index + 1

    def release(self, sequence: Sequence) -> None:
        """Give back every block of a drained sequence."""
        if self.host is None:
            self.pool.release(sequence.blocks)
        else:
            self.host.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_hashed = 0
        sequence.borrows = False

    def forget_all(self) -> Forgotten:
        """Forget every cached prefix in every tier."""
        found = self.pool.forget_all()
        return found if self.host is None else found._replace(num_host=sum(self.host.pool.forget_all()))

    def promised(self, leaving: Iterable[Sequence]) -> int:
        """Blocks that are free once all of ``leaving`` are gone and transfers complete: nobody else holds them."""
        holders = Counter(chain.from_iterable(sequence.blocks for sequence in leaving))
        if self.host is not None:
            holders.update(self.host.leaving())
        return sum(count == block.ref for block, count in holders.items())

    def names(self, sequence: Sequence, first: int = 0) -> Iterator[tuple[bytes, bytes, bytes]]:
        """What the prefix map calls the blocks of a sequence's ``tokens`` from ``first`` on that may come from a cache:
        digest, digest of the block before, ids. Nothing if it calls them nothing. Each is hashed when it is asked for.
        """
        if not self.enable_prefix_caching:
            return
        self._extend_digests(sequence, first)
        data, size = sequence.tokens.tobytes(), self.block_size * sequence.tokens.itemsize
        digests, parent = sequence.digests, _parent(sequence, first)
        for index in range(first, self.num_matchable(sequence)):
            ids = data[index * size : (index + 1) * size]
            if index == len(digests):
                digests.append(block_digest(parent, ids))
            yield digests[index], parent, ids
            parent = digests[index]

    def num_matchable(self, sequence: Sequence) -> int:
        """Blocks of a waiting sequence that may come from a cache: those that are full without its last token."""
        return (len(sequence.tokens) - 1) // self.block_size

    def match(self, sequence: Sequence) -> list[Block]:
        """The longest run of cached blocks that the sequence's tokens, all but the last, begin with."""
        hits: list[Block] = []
        for digest, parent, ids in self.names(sequence):
            block = self.pool.find(digest, parent, ids)
            if block is None:
                break
            hits.append(block)
        return hits

    def _extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        """Know the digests of the first blocks of a waiting sequence."""
        known, size = len(sequence.digests), self.block_size
        if known >= num_blocks:
            return
        data, width = sequence.tokens[known * size : num_blocks * size].tobytes(), size * sequence.tokens.itemsize
        for index in range(num_blocks - known):
            self._digest(sequence, known + index, data[index * width : (index + 1) * width])

    def _digest(self, sequence: Sequence, index: int, ids: bytes) -> bytes:
        """Chain hash of a block of the sequence; those of all blocks before it are known."""
        if index == len(sequence.digests):
            sequence.digests.append(block_digest(_parent(sequence, index), ids))
        return sequence.digests[index]


def _parent(sequence: Sequence, index: int) -> bytes:
    """Digest of the block before ``index``."""
    return sequence.digests[index - 1] if index else sequence.root
