"""Which cached block is given up first. A policy is one class and one line in ``POLICIES``.

A cached block can be hit only while every block before it is cached, so a prefix has to outlive its extensions. The
pool releases the tail of a table first and never frees a block before those that extend it. On top of that each policy
keeps one rule: a block ranks no lower than what extends it, and of equal ranks the one released first goes first.

    lru     rank = time of the release; whoever holds an extension holds the prefix as well
    lfu     rank = age + 1 + hits; whoever hits an extension hits the prefix as well, and the age never falls
    fifo    rank = when the first block of its prefix was cached; the extensions of a prefix are as old as the prefix
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Protocol

from core_engine.block import Block, BlockList

MOST_HITS = 8
"""Hits that count in ``LeastFrequentlyUsed``, measured on the traces of ``headrace bench prefix``."""


class EvictionPolicy(Protocol):
    """Keeps the free blocks that still hold a cached prefix. No operation takes longer than O(log n)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """The blocks in the order in which they go."""

    def cached(self, block: Block, before: Block | None) -> None:
        """A held ``block`` holds a cached prefix from now on; ``before`` is the block before it, if any."""

    def add(self, block: Block) -> None:
        """``block`` was released by its last holder."""

    def remove(self, block: Block) -> None:
        """``block`` was hit and is held again."""

    def evict(self) -> Block:
        """Unlink and return the block to reuse.

        Raises:
            IndexError: there is none.
        """


class LeastRecentlyUsed(BlockList):
    """The block that was released longest ago goes first. Every operation is O(1)."""

    add = BlockList.append
    evict = BlockList.pop_first

    def cached(self, block: Block, before: Block | None) -> None:
        """Its time counts from the release."""


class _Ranked:
    """Blocks by ``key``, and by release among equal ones: a list for each key, and a heap of the keys.

    O(1) but for the first block of a key and the last, which are O(log of the number of keys).
    """

    def __init__(self) -> None:
        self._lists: dict[int, BlockList] = {}
        self._keys: list[int] = []
        """Heap of the keys of ``_lists``; a list that has become empty stays until its key is the lowest."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        return itertools.chain.from_iterable(self._lists[key] for key in sorted(self._lists))

    def remove(self, block: Block) -> None:
        self._lists[block.key].remove(block)
        self._length -= 1

    def evict(self) -> Block:
        while self._keys and not self._lists[self._keys[0]].length:
            del self._lists[heapq.heappop(self._keys)]
        if not self._keys:
            raise IndexError("no block is linked")
        self._length -= 1
        return self._lists[self._keys[0]].pop_first()

    def _append(self, block: Block) -> None:
        blocks = self._lists.get(block.key)
        if blocks is None:
            blocks = self._lists[block.key] = BlockList()
            heapq.heappush(self._keys, block.key)
        blocks.append(block)
        self._length += 1


class LeastFrequentlyUsed(_Ranked):
    """The block with the fewest hits goes first, the least recently released among equals, with dynamic ageing.

    Plain counts keep for ever what was hot once. Here a released block ranks at the present age + 1 + its hits, and
    the age is the rank of what was evicted last: a block that is no longer hit falls behind by one each time as many
    blocks as are free have come and gone (LFU-DA: Arlitt et al., "Evaluating content management techniques for Web
    proxy caches", 1999). Hits beyond ``most_hits`` do not count, so no block outlives its use for longer than that.
    """

    def __init__(self, most_hits: int = MOST_HITS) -> None:
        super().__init__()
        self._most_hits = most_hits
        self._age = 0

    def cached(self, block: Block, before: Block | None) -> None:
        """It ranks when it is released."""

    def add(self, block: Block) -> None:
        block.key = self._age + 1 + min(block.hits, self._most_hits)
        self._append(block)

    def evict(self) -> Block:
        block = super().evict()
        self._age = block.key
        return block


class FirstInFirstOut(_Ranked):
    """The prefix that was cached first goes first, its extensions before it, whether it was hit since or not.

    Prefixes that begin with the same block are of one age, and the least recently released of them goes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def cached(self, block: Block, before: Block | None) -> None:
        block.key = next(self._numbers) if before is None else before.key

    def add(self, block: Block) -> None:
        self._append(block)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
}
