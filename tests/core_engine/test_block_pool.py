"""The pool's invariants under any sequence of operations, and its order of reuse."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core_engine.block import Block, BlockList
from core_engine.block_pool import BlockPool
from core_engine.prefix_hash import block_digest, root_digest

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and release blocks of one pool; a plain model says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[Block]] = []
        self.copies: dict[bytes, set[Block]] = {}
        """Blocks of each name: all held, or a free one alone."""
        self.old: set[Block] = set()
        """Held since before all was forgotten."""

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        table = [self.pool.take() for _ in range(count)]
        left = {digest: blocks.difference(table) for digest, blocks in self.copies.items()}
        self.copies = {digest: blocks for digest, blocks in left.items() if blocks}
        self.old.difference_update(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.integers(0, 5))
    def commit(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        digest, named = bytes([name]), block.digest is not None
        self.pool.commit(block, digest, b"parent", bytes([name, name]))
        if not named and block not in self.old:
            held = {copy for copy in self.copies.get(digest, ()) if copy.ref > 0}
            self.copies[digest] = held | {block}

    @rule(name=st.integers(0, 5))
    def hit(self, name: int) -> None:
        block = self.pool.find(bytes([name]), b"parent", bytes([name, name]))
        assert (block is None) == (bytes([name]) not in self.copies)
        if block is not None:
            assert block in self.copies[bytes([name])]
            self.pool.hold(block)
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(index)
        self.pool.release(table)
        for blocks in self.copies.values():
            for block in table[::-1]:
                if len(blocks) > 1 and block.ref == 0:
                    blocks.discard(block)

    @precondition(lambda self: self.tables)
    @rule()
    def forget(self) -> None:
        held = sum(block.ref > 0 for blocks in self.copies.values() for block in blocks)
        free = sum(map(len, self.copies.values())) - held
        assert self.pool.forget_all() == (free, held, 0)
        self.copies = {}
        self.old = {block for table in self.tables for block in table}
        assert self.pool.fill == self.pool.usage

    @invariant()
    def balanced(self) -> None:
        self.pool.check()
        held = {block.id for table in self.tables for block in table}
        assert self.pool.num_free + len(held) + 1 == NUM_BLOCKS
        assert self.pool.num_references == sum(map(len, self.tables))
        assert 0.0 <= self.pool.usage <= 1.0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def commit(pool: BlockPool, block: Block, name: bytes) -> None:
    pool.commit(block, name, b"", name)


def test_unhashed_blocks_are_reused_before_hashed_ones() -> None:
    pool = BlockPool(5)
    first, second, third, fourth = (pool.take() for _ in range(4))
    commit(pool, first, b"1")
    commit(pool, third, b"3")
    pool.release([first])
    pool.release([second])
    pool.release([third])
    pool.release([fourth])
    assert [pool.take() for _ in range(4)] == [fourth, second, first, third]
    assert pool.find(b"1", b"", b"1") is None


def test_the_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    table = [pool.take() for _ in range(3)]
    for block, name in zip(table, (b"1", b"2", b"3"), strict=True):
        commit(pool, block, name)
    pool.release(table)
    assert pool.take() is table[2]
    assert pool.find(b"1", b"", b"1") is table[0]


def test_a_free_block_can_be_hit_from_the_middle() -> None:
    pool = BlockPool(4)
    table = [pool.take() for _ in range(3)]
    commit(pool, table[1], b"2")
    pool.release(table)
    hit = pool.find(b"2", b"", b"2")
    assert hit is table[1]
    pool.hold(hit)
    pool.check()
    assert pool.num_free == 2


def test_ids_and_parent_are_confirmed() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.commit(block, b"digest", b"parent", b"ids")
    assert pool.find(b"digest", b"parent", b"other") is None
    assert pool.find(b"digest", b"other", b"ids") is None
    assert pool.find(b"digest", b"parent", b"ids") is block


def test_the_first_block_of_a_digest_keeps_the_name() -> None:
    pool = BlockPool(4)
    first, twin = pool.take(), pool.take()
    commit(pool, first, b"1")
    commit(pool, twin, b"1")
    assert pool.find(b"1", b"", b"1") is first
    pool.release([first, twin])
    assert pool.take() is twin
    assert pool.find(b"1", b"", b"1") is first
    pool.check()


def test_an_empty_pool_raises() -> None:
    pool = BlockPool(2)
    pool.take()
    with pytest.raises(IndexError):
        pool.take()


def test_a_pool_needs_two_blocks() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_blocks_are_made_when_they_are_first_taken() -> None:
    """A released block is used again before another one is made, and a cached one is kept while there are others."""
    pool = BlockPool(10**9)
    assert (pool.num_free, pool.num_held, pool.fill, pool.usage) == (10**9 - 1, 0, 0.0, 0.0)
    first, second = pool.take(), pool.take()
    assert (first.id, second.id, pool.num_held) == (1, 2, 2)
    pool.commit(first, b"first", b"", b"")
    pool.release([first])
    pool.release([second])
    assert pool.take() is second
    assert pool.take().id == 3
    assert pool.find(b"first", b"", b"") is first
    pool.check()


def test_block_list_refuses_a_block_twice() -> None:
    blocks, block = BlockList(), Block(1)
    blocks.append(block)
    with pytest.raises(ValueError, match="already linked"):
        blocks.prepend(block)
    blocks.remove(block)
    with pytest.raises(ValueError, match="not linked"):
        blocks.remove(block)


def test_digests_are_sha256_chains() -> None:
    root = root_digest("salt")
    first = block_digest(root, b"aaaa")
    assert first == hashlib.sha256(root + b"aaaa").digest()
    assert block_digest(first, b"bbbb") == hashlib.sha256(first + b"bbbb").digest()
    assert root_digest("a") != root_digest("b") != root_digest("")
