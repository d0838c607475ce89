"""A KV block, and the intrusive doubly linked list that free blocks hang on."""

from __future__ import annotations

from collections.abc import Iterator


class Block:
    """One block of the KV pool. Linked into a list exactly while nobody holds it (``ref == 0``)."""

    __slots__ = ("digest", "following", "generation", "hits", "host", "id", "ids", "key", "parent", "previous", "ref")

    def __init__(self, id: int) -> None:
        self.id = id
        self.ref = 0
        self.generation = 0
        """How often the pool had forgotten everything when the block was taken."""
        self.digest: bytes | None = None
        """Chain hash of a full, settled block that the prefix map names; None: its content is nobody's prefix."""
        self.parent = b""
        """Digest of the block before it."""
        self.ids = b""
        """Token ids of a hashed block, raw int32."""
        self.hits = 0
        """Times that a sequence found its content cached."""
        self.key = 0
        """Rank of its content in an eviction policy that has ranks: what is lower goes first."""
        self.host: HostBlock | None = None
        """Where its present content was copied to, or from, if it may be there still."""
        self.previous: Block | None = None
        self.following: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, ref={self.ref}, {'hashed' if self.digest else 'unhashed'})"


class HostBlock:
    """The copy of a full block in a block of the pool in host memory (``core_engine.host_pool``)."""

    __slots__ = ("digest", "generation", "id", "ids", "is_live", "is_ready", "num_swaps", "parent", "ref")

    def __init__(self, id: int, generation: int) -> None:
        self.id = id
        self.ref = 0
        self.num_swaps = 0
        """How many of its holders are preempted sequences."""
        self.generation = generation
        """That of the block that was copied."""
        self.digest: bytes | None = None
        """As of a ``Block``; None: nobody finds it by name."""
        self.parent = b""
        self.ids = b""
        self.is_ready = False
        """The copy is complete."""
        self.is_live = True
        """False: nobody held it, and its memory was given to another content."""

    def __repr__(self) -> str:
        return f"HostBlock({self.id}, ref={self.ref}, {'ready' if self.is_ready else 'not ready'})"


class BlockList:
    """Blocks in a row: O(1) at both ends and O(1) removal from the middle. A block is in one list at most."""

    def __init__(self) -> None:
        self._ends = Block(-1)
        self._ends.previous = self._ends.following = self._ends
        self.length = 0
        """The same as ``len``, which costs a call: the pool asks for each block."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.following
        while block is not None and block is not self._ends:
            yield block
            block = block.following

    def prepend(self, block: Block) -> None:
        ends = self._ends
        first = ends.following
        if block.previous is not None or first is None:
            raise ValueError(f"{block} is already linked")
        block.previous, block.following = ends, first
        ends.following = first.previous = block
        self.length += 1

    def append(self, block: Block) -> None:
        ends = self._ends
        last = ends.previous
        if block.previous is not None or last is None:
            raise ValueError(f"{block} is already linked")
        block.previous, block.following = last, ends
        last.following = ends.previous = block
        self.length += 1

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.following
        if before is None or after is None:
            raise ValueError(f"{block} is not linked")
        before.following, after.previous = after, before
        block.previous = block.following = None
        self.length -= 1

    def pop_first(self) -> Block:
        """Unlink and return the first block.

        Raises:
            IndexError: the list is empty.
        """
        if not self.length:
            raise IndexError("no block is linked")
        block = self._ends.following
        assert block is not None
        self.remove(block)
        return block
