"""How many free blocks a newcomer must leave to those that run, so that the pool is full but does not thrash."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np

from core_engine.pressure import Wait
from core_engine.replica import Replica
from core_engine.request import Sequence

INITIAL_RATIO = 0.25
LEAST_RATIO = 0.05
RAISE = 0.1
DECAY = 0.995
LOOKAHEAD_TOKENS = 1024


class Admission:
    """A watermark, and an expectation of what the running sequences will still write.

    ``expected_ratio`` is the share of its remaining output, up to ``LOOKAHEAD_TOKENS``, that a sequence is expected to
    produce before another one ends. Each preemption raises it, each step lets it decay (the idea is SGLang's
    ``new_token_ratio``): optimistic while that goes well.
    """

    def __init__(self, watermark: float) -> None:
        self.watermark = watermark
        self.expected_ratio = INITIAL_RATIO

    def stepped(self) -> None:
        self.expected_ratio = max(LEAST_RATIO, self.expected_ratio * DECAY)

    def preempted(self) -> None:
        self.expected_ratio = min(1.0, self.expected_ratio + RAISE)

    def reserve(self, replica: Replica, newcomer: Sequence, growth: float | None = None) -> int:
        """Blocks that must stay free beside those for the newcomer's known tokens; none if it would run alone.

        Args:
            growth: ``expected_growth``, if it is known already.
        """
        if replica.num_running == 0:
            return 0
        if growth is None:
            growth = self.expected_growth(replica)
        growth += self.own_growth(replica, newcomer)
        return max(math.floor(self.watermark * replica.kv.pool.num_blocks), int(growth))

    def lacks(self, replica: Replica, newcomer: Sequence, reserve: int) -> Wait:
        """What a newcomer that was not let in with this ``reserve`` lacks, as if none of its prompt were cached."""
        pool, wanted = replica.kv.pool, replica.kv.blocks_for(len(newcomer.tokens))
        if wanted > pool.num_free:
            return Wait.BLOCKS
        if wanted + reserve <= pool.num_free:
            return Wait.BUDGET
        is_fixed = reserve <= math.floor(self.watermark * pool.num_blocks)
        return Wait.WATERMARK if is_fixed else Wait.RESERVE

    def own_growth(self, replica: Replica, newcomer: Sequence) -> int:
        """Blocks that a sequence is expected to ask for beside those for its known tokens."""
        kv, length = replica.kv, len(newcomer.tokens)
        held = kv.blocks_for(length) * kv.block_size
        expected = self.expected_ratio * min(newcomer.limit - length, LOOKAHEAD_TOKENS)
        return max(math.ceil((length + expected - held) / kv.block_size), 0) * newcomer.request.num_seats

    def expected_growth(self, replica: Replica, without: SequenceOf[int] = ()) -> float:
        """Blocks that the running sequences are expected to ask for, but for those in the slots ``without``."""
        slots = replica.slots
        expected = self.expected_ratio * np.minimum(slots.limit - slots.num_tokens, LOOKAHEAD_TOKENS)
        blocks = np.ceil((slots.num_tokens + expected - slots.capacity) / replica.kv.block_size)
        growth = np.where(slots.leaving, 0.0, np.maximum(blocks, 0.0))
        growth[np.array(without, np.intp)] = 0.0
        return float(growth.sum())
