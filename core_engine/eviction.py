"""Which cached block is given up first. A policy is one class and one line in ``POLICIES``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from core_engine.block import Block, BlockList


class EvictionPolicy(Protocol):
    """Keeps the free blocks that still hold a cached prefix."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]: ...

    def add(self, block: Block) -> None:
        """``block`` was released by its last holder."""

    def remove(self, block: Block) -> None:
        """``block`` was hit and is held again."""

    def evict(self) -> Block:
        """Unlink and return the block to reuse."""


class LeastRecentlyUsed:
    """The block that was released longest ago goes first."""

    def __init__(self) -> None:
        self._blocks = BlockList()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def add(self, block: Block) -> None:
        self._blocks.append(block)

    def remove(self, block: Block) -> None:
        self._blocks.remove(block)

    def evict(self) -> Block:
        return self._blocks.pop_first()


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed}
