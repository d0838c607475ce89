"""What a waiting sequence finds in host memory comes back to the device while it waits.

first, for its turn ──▶ load: the cached prefix is held, blocks for all other tokens are taken, some are copied into
                        meanwhile others run; the sequence is passed over
complete            ──▶ admitted before everybody else, as its memory is there already
dropped             ──▶ waits like any other; what was copied stays in the prefix cache
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from core_engine.block import Block, HostBlock
from core_engine.request import Sequence
from core_engine.transfers import TO_DEVICE, Transfer

if TYPE_CHECKING:
    from core_engine.host_memory import HostMemory


class Continuation(NamedTuple):
    """How a waiting sequence goes on after what the device caches of it."""

    cached: list[Block]
    """On the device."""
    found: list[HostBlock]
    """In host memory, the next ones."""
    must_wait: bool
    """One more is its own and being copied, or somebody else has it copied to the device."""


class Load(Transfer):
    """Blocks for all tokens of a waiting sequence, as far as they are not copied to be computed.

    Args:
        blocks: a block table, each held for this load: the cached ones, those to copy into, those to compute.
        sources: what is copied, each held once.
    """

    direction = TO_DEVICE

    def __init__(
        self,
        host: HostMemory,
        sequence: Sequence,
        blocks: list[Block],
        num_cached: int,
        sources: list[HostBlock],
    ) -> None:
        super().__init__(list(zip(blocks[num_cached:], sources, strict=False)))
        self.host = host
        self.sequence: Sequence | None = sequence
        """None: it was dropped."""
        self.blocks = blocks
        self.num_cached = num_cached
        self.num_loaded = num_cached + len(sources)
        """Blocks with KV once it is complete."""
        self.is_complete = False
        self._named_for = sequence
        """Its first tokens, which never change, are those of the blocks."""

    def copies(self, digest: bytes) -> bool:
        """Whether the first block that is being copied will be cached by this name."""
        return not self.is_complete and self.host.kv.digest_of(self._named_for, self.num_cached) == digest

    @property
    def num_seats(self) -> int:
        return 0 if self.sequence is None else self.sequence.request.num_seats

    @property
    def leaving(self) -> list[Block]:
        return self.blocks if self.sequence is None else []

    def completed(self) -> None:
        self.is_complete = True
        pool, device = self.host.pool, self.host.kv.pool
        for block, source in self.pairs:
            block.host, block.generation = source, source.generation
        names = self.host.kv.names(self._named_for, self.num_cached)
        for index, name in zip(range(self.num_cached, self.num_loaded), names, strict=False):
            device.commit(self.blocks[index], *name, self.blocks[index - 1] if index else None)
        for _, source in reversed(self.pairs):
            pool.release(source)
        if self.sequence is None:
            self.host.release(self.blocks)

    def drop(self) -> None:
        """Nobody waits for it any more, or others need its blocks more: these are back once they are in no transfer."""
        sequence = self.sequence
        assert sequence is not None
        del self.host.loads[sequence]
        sequence.load = self.sequence = None
        if self.is_complete:
            self.host.release(self.blocks)
        elif self.host.transfers.cancel(self):
            for _, source in reversed(self.pairs):
                self.host.pool.release(source)
            self.host.release(self.blocks)

    def admit(self) -> int:
        """Give the blocks to the sequence, which starts. Returns its tokens whose KV is there."""
        sequence = self.sequence
        assert sequence is not None
        assert self.is_complete
        del self.host.loads[sequence]
        sequence.load = None
        sequence.blocks, sequence.num_hashed = self.blocks, self.num_loaded
        return self.num_loaded * self.host.kv.block_size
