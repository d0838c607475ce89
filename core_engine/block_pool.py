"""The pool of KV blocks: reference counts, the free blocks in order of reuse, and the map of cached prefixes.

    block 0      the null block: padding points at it; never handed out
    ref == 0     linked: unhashed blocks are reused first, then hashed ones as the eviction policy says
    ref >= 1     held by that many sequences, not linked
    no object    never used: a ``Block`` is made when it is first taken, after the unhashed ones are used up

Sequences that compute the same prefix side by side make copies of it. Each copy has the digest while it is held, the
oldest is the one to be found, and what is released while there is another copy is not worth keeping.

No call pauses for the size of the pool: nothing is made in advance, and the map of prefixes is several dicts, of which
one at a time is rebuilt as it grows or churns (one of a million entries would stop the engine for 40 to 70 ms).

Invariants (``check``): free + referenced + 1 == total; ref == 0 ⇔ linked; a digest names full settled blocks of one
content, all of them held or a single free one. So whoever holds a cached block holds a copy of each block before it,
and with the order of eviction (``core_engine.eviction``): the block before a cached one is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from core_engine.block import Block, BlockList
from core_engine.eviction import POLICIES

LEAST_BLOCKS = 2
"""Of a pool: the null block and one more."""
NUM_SHARDS = 16
"""With more of them a million entries are slower to look up, with fewer they are longer to rebuild: 4 ms with 16."""


class Forgotten(NamedTuple):
    """What was found cached, in blocks, when all was forgotten."""

    num_free: int
    """They have no holder: their memory is empty now."""
    num_held: int
    """Their memory is back once their holders are gone."""
    num_host: int = 0
    """Copies in host memory, whether somebody holds them or not."""


class BlockPool:
    """Blocks 0..num_blocks-1 of one worker's KV cache."""

    def __init__(self, num_blocks: int, eviction: str = "lru") -> None:
        if num_blocks < LEAST_BLOCKS:
            raise ValueError(f"a KV pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks = [Block(0)]
        """Those that were ever taken, by id."""
        self._blocks[0].ref = 1
        self._unhashed = BlockList()
        self._policy = POLICIES[eviction]
        self._hashed = self._policy()
        self._shards: list[dict[bytes, Block]] = [{} for _ in range(NUM_SHARDS)]
        """The block to be found of each digest."""
        self._copies: dict[bytes, dict[Block, None]] = {}
        """The other blocks of a digest, all held, where there are any."""
        self._generation = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; those with a cached prefix count as free."""
        return self.num_blocks - len(self._blocks) + len(self._unhashed) + len(self._hashed)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds, each counted once."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_references(self) -> int:
        """Holders of all blocks together."""
        return sum(block.ref for block in self._blocks[1:])

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    @property
    def fill(self) -> float:
        """Share of the usable blocks that are held or cache a prefix, 0 to 1."""
        return (len(self._blocks) - 1 - len(self._unhashed)) / (self.num_blocks - 1)

    def take(self) -> Block:
        """A block for new content, held once. What it cached is forgotten.

        Raises:
            IndexError: no block is free.
        """
        if self._unhashed.length:
            block = self._unhashed.pop_first()
        elif len(self._blocks) < self.num_blocks:
            block = Block(len(self._blocks))
            self._blocks.append(block)
        else:
            block = self._hashed.evict()
            self._forget(block)
        block.ref = 1
        block.generation = self._generation
        block.host = None
        return block

    def find(self, digest: bytes, parent: bytes, ids: bytes) -> Block | None:
        """The block that caches this prefix; ``parent`` and ``ids`` are compared, so a collision is no hit."""
        block = self._shards[digest[0] % NUM_SHARDS].get(digest)
        return block if block is not None and block.ids == ids and block.parent == parent else None

    def has(self, digest: bytes) -> bool:
        """Whether a block caches a prefix of this digest."""
        return digest in self._shards[digest[0] % NUM_SHARDS]

    def has_copies(self, block: Block) -> bool:
        """Whether other blocks have the same digest."""
        return block.digest in self._copies

    def hold(self, block: Block, *, is_hit: bool = True) -> None:
        """One more holder of a cached block, free or not, that holds all blocks before it, too.

        Args:
            is_hit: it is new here; False: a preempted sequence comes back to what it had.
        """
        if block.ref == 0:
            self._hashed.remove(block)
        block.ref += 1
        block.hits += is_hit

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less of each block of a table. The tail is freed first, so a prefix outlives its extensions."""
        for block in reversed(blocks):
            block.ref -= 1
            if block.ref == 0:
                if block.digest is not None and block.digest in self._copies:
                    self._drop_copy(block, block.digest)
                if block.digest is None:
                    self._unhashed.prepend(block)
                else:
                    self._hashed.add(block)

    def commit(self, block: Block, digest: bytes, parent: bytes, ids: bytes, before: Block | None = None) -> None:
        """Name a held block, full and settled, by its digest. The first block of a digest is the one to be found.

        Nothing happens where nobody could hit it or must not: the block before it has no name, what it holds is from
        before ``forget_all``, or the digest names another content.

        Args:
            before: the block before it in the table of its holder; None: it is the first.
        """
        if block.digest is not None or block.generation != self._generation:
            return
        if before is not None and before.digest != parent:
            return
        shard = self._shards[digest[0] % NUM_SHARDS]
        named = shard.get(digest)
        if named is None:
            shard[digest] = block
            self._hashed.cached(block, before)
        elif named.ids != ids or named.parent != parent:
            return
        elif named.ref > 0:
            self._copies.setdefault(digest, {})[block] = None
            block.key = named.key
        else:
            self._hashed.remove(named)
            self._inherit(block, named, digest)
            self._unhashed.prepend(named)
        block.digest, block.parent, block.ids = digest, parent, ids

    def forget_all(self) -> Forgotten:
        """Forget every cached prefix: no content that is in the pool now is ever hit.

        Held blocks stay with their holders, without names. So do those that they go on to fill: KV that was computed
        from forgotten KV is as old.
        """
        num_free = len(self._hashed)
        named = list(chain(*(shard.values() for shard in self._shards), *self._copies.values()))
        for _ in range(num_free):
            self._unhashed.append(self._hashed.evict())
        for block in named:
            _unname(block)
        for shard in self._shards:
            shard.clear()
        self._copies.clear()
        self._hashed = self._policy()
        self._generation += 1
        return Forgotten(num_free, len(named) - num_free)

    def check(self) -> None:
        """Assert every invariant of the pool; for tests and idle moments."""
        free = [*self._unhashed, *self._hashed]
        num_unused = self.num_blocks - len(self._blocks)
        assert len(free) == self.num_free - num_unused == len({block.id for block in free})
        assert all(block.ref == 0 for block in free), "a held block is linked"
        referenced = sum(block.ref > 0 for block in self._blocks[1:])
        assert len(free) + referenced + 1 == len(self._blocks), "a free block is not linked"
        assert all(block.digest is None for block in self._unhashed)
        assert all(block.digest is not None for block in self._hashed)
        named = {block for block in self._blocks if block.digest is not None}
        copies = [copy for each in self._copies.values() for copy in each]
        found = [block for shard in self._shards for block in shard.values()]
        assert len(named) == len(found) + len(copies)
        assert named == {*found, *copies}, "a digest names another block than one that carries it"
        for digest, others in self._copies.items():
            first = self._shards[digest[0] % NUM_SHARDS][digest]
            assert others, "an empty set of copies is kept"
            assert all(block.ref > 0 for block in (first, *others)), "a copy is free"
            assert {(block.digest, block.parent, block.ids) for block in others} == {(digest, first.parent, first.ids)}
        assert self._blocks[0].ref == 1
        assert self._blocks[0].digest is None

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._shards[block.digest[0] % NUM_SHARDS][block.digest]
            _unname(block)

    def _drop_copy(self, block: Block, digest: bytes) -> None:
        """One of several blocks of a digest was released."""
        others = self._copies[digest]
        if self._shards[digest[0] % NUM_SHARDS][digest] is block:
            heir, _ = others.popitem()
            self._inherit(heir, block, digest)
        else:
            del others[block]
            _unname(block)
        if not others:
            del self._copies[digest]

    def _inherit(self, heir: Block, block: Block, digest: bytes) -> None:
        """A held copy of an unlinked ``block`` is the one to be found from now on, with the same rank."""
        self._shards[digest[0] % NUM_SHARDS][digest] = heir
        heir.hits, heir.key = block.hits, block.key
        _unname(block)


def _unname(block: Block) -> None:
    block.digest = None
    block.parent = block.ids = b""
    block.hits = block.key = 0
