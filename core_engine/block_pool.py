"""The pool of KV blocks: reference counts, the free blocks in order of reuse, and the map of cached prefixes.

    block 0      the null block: padding points at it; never handed out
    ref == 0     linked: unhashed blocks are reused first, then hashed ones as the eviction policy says
    ref >= 1     held by that many sequences, not linked

Invariants (``check``): free + referenced + 1 == total; ref == 0 ⇔ linked; a digest names one full settled block.
"""

from __future__ import annotations

from collections.abc import Sequence

from core_engine.block import Block, BlockList
from core_engine.eviction import POLICIES


class BlockPool:
    """Blocks 0..num_blocks-1 of one worker's KV cache."""

    def __init__(self, num_blocks: int, eviction: str = "lru") -> None:
        if num_blocks < 2:
            raise ValueError(f"a KV pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._blocks[0].ref = 1
        self._unhashed = BlockList()
        self._hashed = POLICIES[eviction]()
        self._by_digest: dict[bytes, Block] = {}
        for block in self._blocks[1:]:
            self._unhashed.append(block)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; those with a cached prefix count as free."""
        return len(self._unhashed) + len(self._hashed)

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
        return 1.0 - len(self._unhashed) / (self.num_blocks - 1)

    def take(self) -> Block:
        """A block for new content, held once. What it cached is forgotten.

        Raises:
            IndexError: no block is free.
        """
        if self._unhashed:
            block = self._unhashed.pop_first()
        else:
            block = self._hashed.evict()
            self._forget(block)
        block.ref = 1
        return block

    def find(self, digest: bytes, parent: bytes, ids: bytes) -> Block | None:
        """The block that caches this prefix; ``parent`` and ``ids`` are compared, so a collision is no hit."""
        block = self._by_digest.get(digest)
        return block if block is not None and block.ids == ids and block.parent == parent else None

    def has(self, digest: bytes) -> bool:
        """Whether a block caches a prefix of this digest."""
        return digest in self._by_digest

    def hold(self, block: Block) -> None:
        """One more holder of a cached block, free or not."""
        if block.ref == 0:
            self._hashed.remove(block)
        block.ref += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less of each block of a table. The tail is freed first, so a prefix outlives its extensions."""
        for block in reversed(blocks):
            block.ref -= 1
            if block.ref == 0:
                if block.digest is None:
                    self._unhashed.prepend(block)
                else:
                    self._hashed.add(block)

    def commit(self, block: Block, digest: bytes, parent: bytes, ids: bytes) -> None:
        """Name a held block, full and settled, by its digest. The first block of a digest keeps the name."""
        if block.digest is None and digest not in self._by_digest:
            block.digest, block.parent, block.ids = digest, parent, ids
            self._by_digest[digest] = block

    def check(self) -> None:
        """Assert every invariant of the pool; for tests and idle moments."""
        free = [*self._unhashed, *self._hashed]
        assert len(free) == self.num_free == len({block.id for block in free})
        assert all(block.ref == 0 for block in free), "a held block is linked"
        referenced = sum(block.ref > 0 for block in self._blocks[1:])
        assert len(free) + referenced + 1 == self.num_blocks, "a free block is not linked"
        assert all(block.digest is None for block in self._unhashed)
        named = {block.digest: block for block in self._blocks if block.digest is not None}
        assert named == self._by_digest, "a digest names another block than the one that carries it"
        assert self._blocks[0].ref == 1
        assert self._blocks[0].digest is None

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._by_digest[block.digest]
            block.digest = None
            block.parent = block.ids = b""
