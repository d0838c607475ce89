"""The pool of KV blocks in the host memory of one worker: who holds a copy there, and which prefixes are kept there.

    ref >= 1     held: by a transfer, by a preempted sequence that will come back to it (swap)
    ref == 0     kept for whoever begins with it, least recently used first to go, if it has a name and the pool is a
                 tier of the prefix cache; else free

A ``HostBlock`` is one content in one block. What is written over it is another ``HostBlock`` of the same id.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from core_engine.block import Block, HostBlock


class HostForgotten(NamedTuple):
    """What ``HostPool.forget_all`` found cached, in blocks."""

    num_free: int
    num_held: int


class HostPool:
    """Blocks 0..num_blocks-1.

    Args:
        most_swapped: blocks that preempted sequences may hold.
        is_tier: named blocks are kept when nobody holds them.
    """

    def __init__(self, num_blocks: int, *, most_swapped: int, is_tier: bool) -> None:
        self.num_blocks = num_blocks
        self.most_swapped = most_swapped
        self.is_tier = is_tier
        self.num_swapped = 0
        """Blocks that preempted sequences hold."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[HostBlock, None] = OrderedDict()
        """The first one goes first. A dict would pass over all that have gone to find it."""
        self._by_digest: dict[bytes, HostBlock] = {}

    @property
    def num_kept(self) -> int:
        """Blocks with a cached prefix that nobody holds."""
        return len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._kept)

    def take(self, block: Block) -> HostBlock | None:
        """A block, held once, for the content of ``block``, under its name; None: all are held."""
        if self._free:
            id = self._free.pop()
        elif self._kept:
            oldest, _ = self._kept.popitem(last=False)
            self._end(oldest)
            id = self._free.pop()
        else:
            return None
        host = HostBlock(id, block.generation)
        host.ref = 1
        if block.digest is not None and block.digest not in self._by_digest:
            host.digest, host.parent, host.ids = block.digest, block.parent, block.ids
            self._by_digest[block.digest] = host
        return host

    def copy_of(self, block: Block) -> HostBlock | None:
        """Where the content of a full block is, or is being written."""
        host = block.host
        if host is not None and host.is_live:
            return host
        found = None if block.digest is None else self.find(block.digest, block.parent, block.ids)
        block.host = found
        return found

    def find(self, digest: bytes, parent: bytes, ids: bytes) -> HostBlock | None:
        """The copy of a block by its name, whether it is complete or not; a collision is none."""
        host = self._by_digest.get(digest)
        return host if host is not None and host.ids == ids and host.parent == parent else None

    def collides(self, block: Block) -> bool:
        """Whether a copy of a block could not be found here, as another content has its name."""
        digest = block.digest
        if digest is None or digest not in self._by_digest:
            return False
        return self.find(digest, block.parent, block.ids) is None

    def has(self, digest: bytes) -> bool:
        """Whether there is a complete copy of a block of this name."""
        host = self._by_digest.get(digest)
        return host is not None and host.is_ready

    def hold(self, host: HostBlock) -> None:
        if host.ref == 0:
            del self._kept[host]
        host.ref += 1

    def release(self, host: HostBlock) -> None:
        """One holder less. What the pool keeps is now the most recently used."""
        host.ref -= 1
        if host.ref == 0:
            if host.digest is not None and self.is_tier:
                self._kept[host] = None
            else:
                self._end(host)

    def touch(self, host: HostBlock) -> None:
        """Its content was used on the device."""
        if host.ref == 0:
            self._kept.move_to_end(host)

    def hold_swapped(self, host: HostBlock) -> None:
        """Hold it for a preempted sequence."""
        self.hold(host)
        host.num_swaps += 1
        self.num_swapped += host.num_swaps == 1

    def release_swapped(self, host: HostBlock) -> None:
        host.num_swaps -= 1
        self.num_swapped -= host.num_swaps == 0
        self.release(host)

    def forget_all(self) -> HostForgotten:
        """No content that is here now is found any more. Held blocks stay with their holders, without names."""
        kept, num_named = list(self._kept), len(self._by_digest)
        for host in self._by_digest.values():
            host.digest = None
        self._by_digest.clear()
        self._kept.clear()
        for host in kept:
            self._end(host)
        return HostForgotten(len(kept), num_named - len(kept))

    def check(self) -> None:
        """Assert what can be told from here; ``HostMemory.check`` counts the holders."""
        assert len(set(self._free)) == len(self._free)
        assert not {host.id for host in self._kept} & set(self._free), "a cached block is free"
        assert all(host.ref == 0 and host.is_ready and host.is_live and host.digest for host in self._kept)
        assert self.is_tier or not self._kept
        assert all(host.is_live and host.digest == digest for digest, host in self._by_digest.items())
        assert 0 <= self.num_swapped <= self.most_swapped

    def _end(self, host: HostBlock) -> None:
        """Its memory is free."""
        host.is_live = False
        if host.digest is not None:
            del self._by_digest[host.digest]
            host.digest = None
        self._free.append(host.id)
