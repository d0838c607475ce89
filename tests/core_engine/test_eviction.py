"""The eviction policies against plain ones, and that a cached prefix outlives what extends it under each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core_engine import eviction
from core_engine import kv_cache_manager as manager_module
from core_engine.block import Block
from core_engine.block_pool import BlockPool, Forgotten
from core_engine.eviction import POLICIES, EvictionPolicy, LeastFrequentlyUsed
from core_engine.kv_cache_manager import KVCacheManager
from core_engine.prefix_hash import block_digest, root_digest
from core_engine.request import Request, Sequence
from shared.sampling import SamplingParams
from tests.core_engine.simulation import Simulation

BLOCK_SIZE = 2
ROOT = root_digest()
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


@dataclasses.dataclass
class Content:
    """What a plain policy knows of a digest."""

    cached: int
    hits: int
    rank: tuple[int, int] = (0, 0)


class PlainPolicy:
    """A policy in the fewest words: what happened is kept by digest, and ``min`` looks at every free block."""

    def __init__(self, name: str, pool: BlockPool) -> None:
        self.name, self.pool = name, pool
        self.known: dict[bytes, Content] = {}
        self.free: dict[bytes, Block] = {}
        self.time = self.age = 0

    def add(self, block: Block) -> None:
        assert block.digest is not None
        self.time += 1
        content = self.known[block.digest]
        match self.name:
            case "lru":
                rank = 0
            case "lfu":
                rank = self.age + 1 + min(content.hits, eviction.MOST_HITS)
            case "fifo":
                rank = min(self.known[digest].cached for digest in [block.digest, *self.before(block)])
        content.rank = (rank, self.time)
        self.free[block.digest] = block

    def first(self) -> bytes:
        return min(self.free, key=lambda digest: self.known[digest].rank)

    def before(self, block: Block) -> Iterator[bytes]:
        """Digests of the chain in front of a block."""
        while block.parent != ROOT:
            yield block.parent
            found = [shard[block.parent] for shard in self.pool._shards if block.parent in shard]
            [block] = found


class CheckedPolicy:
    """The real policy, and beside it the plain one, that must choose the same block."""

    def __init__(self, name: str, pool: BlockPool) -> None:
        self.real: EvictionPolicy = POLICIES[name]()
        self.plain = PlainPolicy(name, pool)

    def __len__(self) -> int:
        return len(self.real)

    def __iter__(self) -> Iterator[Block]:
        ranked = sorted(self.plain.free, key=lambda digest: self.plain.known[digest].rank)
        assert [block.digest for block in self.real] == ranked
        return iter(list(self.real))

    def cached(self, block: Block, before: Block | None) -> None:
        self.real.cached(block, before)

    def add(self, block: Block) -> None:
        self.real.add(block)
        self.plain.add(block)

    def remove(self, block: Block) -> None:
        self.real.remove(block)
        del self.plain.free[block.digest or b""]

    def evict(self) -> Block:
        chosen = self.plain.first()
        self.plain.age = self.plain.known[chosen].rank[0]
        del self.plain.free[chosen], self.plain.known[chosen]
        block = self.real.evict()
        assert block.digest == chosen
        return block


class CheckedPool(BlockPool):
    """Tells the plain policy what is cached and hit, by digest."""

    def __init__(self, num_blocks: int, name: str) -> None:
        super().__init__(num_blocks, name)
        self.name = name
        self.checked = self._hashed = CheckedPolicy(name, self)
        self.number = 0

    def hold(self, block: Block, *, is_hit: bool = True) -> None:
        super().hold(block, is_hit=is_hit)
        self.checked.plain.known[block.digest or b""].hits += is_hit

    def commit(self, block: Block, digest: bytes, parent: bytes, ids: bytes, before: Block | None = None) -> None:
        known = self.has(digest)
        super().commit(block, digest, parent, ids, before)
        if block.digest == digest and not known:
            self.number += 1
            self.checked.plain.known[digest] = Content(self.number, 0)

    def forget_all(self) -> Forgotten:
        forgotten = super().forget_all()
        self.checked = self._hashed = CheckedPolicy(self.name, self)
        self.number = 0
        return forgotten


class CacheMachine(RuleBasedStateMachine):
    """Sequences over few tokens, so that they share prefixes and compute some side by side; few blocks."""

    NUM_BLOCKS = 12

    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def start(self, name: str) -> None:
        self.kv = KVCacheManager(self.NUM_BLOCKS, BLOCK_SIZE)
        self.kv.pool = CheckedPool(self.NUM_BLOCKS, name)
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.stale: set[Sequence] = set()

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, prompt: list[int]) -> None:
        self._allocate(make_sequence(prompt))

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.preempted))
        if self._allocate(sequence):
            self.preempted.remove(sequence)

    def _allocate(self, sequence: Sequence) -> bool:
        cached = self.kv.num_cached(sequence)
        found = self.kv.allocate(sequence)
        if found is not None:
            assert found == cached, "a cached block behind one that is not"
            self.running.append(sequence)
        return found is not None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 14))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        settled = min(len(sequence.tokens), sequence.num_hashed * BLOCK_SIZE + count)
        self.kv.commit(sequence, sequence.tokens, settled)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans())
    def leave(self, data: st.DataObject, preempt: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.stale.discard(sequence)
        self.kv.release(sequence)
        if preempt:
            sequence.num_preemptions += 1
            self.preempted.append(sequence)

    @rule()
    def forget(self) -> None:
        self.kv.pool.forget_all()
        self.stale = set(self.running)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        pool = self.kv.pool
        pool.check()
        assert not unreachable(pool)
        for sequence in self.stale:
            assert all(block.digest is None for block in sequence.blocks)

    def teardown(self) -> None:
        """All that was ever cached goes in the right order."""
        if hasattr(self, "kv"):
            for sequence in self.running:
                self.kv.release(sequence)
            for _ in range(self.kv.pool.num_free):
                self.kv.pool.take()
                self.sound()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def make_sequence(prompt: list[int]) -> Sequence:
    tokens = np.array(prompt, np.int32)
    request = Request("r", SamplingParams(), tokens, order=0, arrived_at=0.0, stop_ids=frozenset())
    return Sequence(request, 0, np.empty(0, np.int32), limit=1000)


def unreachable(pool: BlockPool) -> list[Block]:
    """Cached blocks that nobody can hit, because a block before them is not cached."""
    named = [block for block in pool._blocks if block.digest is not None]
    return [block for block in named if block.parent != ROOT and not pool.has(block.parent)]


def run_through(kv: KVCacheManager, prompt: list[int]) -> int:
    """Compute a prompt and leave; returns the tokens that were cached."""
    sequence = make_sequence(prompt)
    cached = kv.allocate(sequence)
    assert cached is not None
    kv.commit(sequence, sequence.tokens, len(prompt))
    kv.release(sequence)
    return cached


def conversation(number: int, length: int) -> list[int]:
    return [1000 + number * 100 + position for position in range(length)]


def cached_lengths(kv: KVCacheManager, prompts: list[list[int]]) -> list[int]:
    return [kv.num_cached(make_sequence([*prompt, 0])) for prompt in prompts]


@pytest.mark.parametrize(("policy", "left"), [("lru", "hot"), ("lfu", "hot"), ("fifo", "new")])
def test_what_a_hit_is_worth(policy: str, left: str) -> None:
    kv = KVCacheManager(13, BLOCK_SIZE, eviction=policy)
    hot, new, newest = (conversation(number, 8) for number in range(3))
    for prompt in (hot, new, [*hot, 1]):
        run_through(kv, prompt)
    run_through(kv, newest)
    run_through(kv, conversation(3, 8))
    lengths = cached_lengths(kv, [hot, new])
    assert lengths == ([8, 0] if left == "hot" else [0, 8])


def test_a_scan_takes_nothing_that_is_in_use_from_lfu() -> None:
    found = {}
    for policy in POLICIES:
        kv = KVCacheManager(21, BLOCK_SIZE, eviction=policy)
        hot = conversation(0, 12)
        for _ in range(4):
            run_through(kv, [*hot, 1])
        for number in range(1, 5):
            run_through(kv, conversation(number, 16))
        found[policy] = run_through(kv, [*hot, 1])
    assert found == {"lru": 0, "lfu": 12, "fifo": 0}


def test_lfu_forgets_what_was_hot_once() -> None:
    kv = KVCacheManager(21, BLOCK_SIZE, eviction="lfu")
    hot = conversation(0, 12)
    for _ in range(1000):
        run_through(kv, [*hot, 1])
    rounds = 0
    while kv.num_cached(make_sequence([*hot, 1])):
        rounds += 1
        for number in range(4):
            run_through(kv, conversation(4 * rounds + number, 8))
    assert 1 < rounds <= eviction.MOST_HITS + 2


def test_a_preempted_sequence_does_not_count_as_a_hit() -> None:
    kv = KVCacheManager(21, BLOCK_SIZE)
    sequence = make_sequence(conversation(0, 8))
    for preemptions in range(3):
        sequence.num_preemptions = preemptions
        kv.allocate(sequence)
        kv.commit(sequence, sequence.tokens, 8)
        block = sequence.blocks[0]
        kv.release(sequence)
    assert block.hits == 0
    run_through(kv, conversation(0, 8))
    assert block.hits == 1


@EVERY_POLICY
def test_unreachable_blocks_do_not_accumulate(policy: str) -> None:
    draw = np.random.default_rng(0)
    kv = KVCacheManager(41, BLOCK_SIZE, eviction=policy)
    running: list[Sequence] = []
    for _ in range(1500):
        sequence = make_sequence(draw.integers(0, 2, draw.integers(1, 16)).tolist())
        while kv.allocate(sequence) is None:
            kv.release(running.pop(draw.integers(len(running))))
        running.append(sequence)
        other = running[draw.integers(len(running))]
        kv.commit(other, other.tokens, int(draw.integers(len(other.tokens) + 1)))
        assert not unreachable(kv.pool)
        kv.pool.check()


def test_the_copy_goes_on_when_the_first_block_of_a_digest_is_released() -> None:
    kv = KVCacheManager(11, BLOCK_SIZE)
    first, second = (make_sequence(conversation(0, 8)) for _ in range(2))
    kv.allocate(first)
    kv.allocate(second)
    kv.commit(first, first.tokens, 4)
    kv.commit(second, second.tokens, 8)
    kv.release(first)
    assert kv.pool.fill == kv.pool.usage == 0.4
    kv.pool.check()
    kv.release(second)
    assert kv.num_cached(make_sequence([*conversation(0, 8), 1])) == 8


def test_forgotten_blocks_are_never_hit_again() -> None:
    kv = KVCacheManager(21, BLOCK_SIZE)
    prompt = conversation(0, 8)
    run_through(kv, conversation(1, 8))
    running = make_sequence([*prompt, 1])
    kv.allocate(running)
    kv.commit(running, running.tokens, 5)
    assert kv.pool.forget_all() == Forgotten(num_free=4, num_held=2)
    assert kv.pool.fill == kv.pool.usage
    kv.grow(running)
    kv.commit(running, np.array([*running.tokens, 2], np.int32), 10)
    assert cached_lengths(kv, [prompt, conversation(1, 8)]) == [0, 0]
    kv.release(running)
    assert kv.pool.fill == 0.0
    assert kv.pool.forget_all() == (0, 0, 0)
    run_through(kv, prompt)
    assert cached_lengths(kv, [prompt]) == [8]
    kv.pool.check()


def test_a_colliding_hash_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def weak(parent: bytes, ids: bytes) -> bytes:
        return block_digest(parent, ids)[:1]

    monkeypatch.setattr(manager_module, "block_digest", weak)
    for policy in POLICIES:
        simulation = Simulation(40, eviction=policy)
        draw = np.random.default_rng(1)
        for _ in range(60):
            simulation.submit(draw.integers(0, 3, draw.integers(1, 20)).tolist(), max_tokens=8, ignore_eos=True)
            simulation.tick()
        simulation.run()
        simulation.check_outputs()
        simulation.check_empty()


@EVERY_POLICY
def test_outputs_are_those_of_each_request_alone(policy: str) -> None:
    simulation = Simulation(24, eviction=policy)
    draw = np.random.default_rng(2)
    prefixes = [draw.integers(0, 97, 12).tolist() for _ in range(3)]
    for _ in range(40):
        prompt = prefixes[draw.integers(3)] + draw.integers(0, 97, draw.integers(1, 8)).tolist()
        simulation.submit(prompt, max_tokens=12, n=int(draw.integers(1, 3)), ignore_eos=True)
        simulation.tick()
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()
    assert sum(request.sequences[0].cached_tokens or 0 for request in simulation.requests) > 0


def test_an_empty_policy_has_nothing_to_evict() -> None:
    policies: list[Any] = [*POLICIES.values(), lambda: LeastFrequentlyUsed(1)]
    for policy in policies:
        with pytest.raises(IndexError):
            policy().evict()
