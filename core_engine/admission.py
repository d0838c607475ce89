"""How many free blocks a newcomer must leave to those that run, so that the pool is full but does not thrash."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from core_engine.replica import Replica
from core_engine.request import Sequence

INITIAL_RATIO = 0.25
LEAST_RATIO = 0.1
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

    def reserve(self, replica: Replica, newcomer: Sequence) -> int:
        """Blocks that must stay free beside those for the newcomer's known tokens; none if it would run alone."""
        if replica.num_running == 0:
            return 0
        slots, kv = replica.slots, replica.kv
        staying = ~slots.leaving
        growth = self._growth(slots.num_tokens, slots.limit, slots.capacity, kv.block_size)[staying].sum()
        length, limit = len(newcomer.tokens), newcomer.limit
        held = kv.blocks_for(length) * kv.block_size
        growth += self._growth(np.array([length]), np.array([limit]), np.array([held]), kv.block_size).sum()
        return max(math.floor(self.watermark * kv.pool.num_blocks), int(growth))

    def _growth(
        self,
        length: npt.NDArray[np.int64],
        limit: npt.NDArray[np.int64],
        capacity: npt.NDArray[np.int64],
        block_size: int,
    ) -> npt.NDArray[np.float64]:
        """Blocks that sequences will ask for beyond those they hold."""
        expected = self.expected_ratio * np.minimum(limit - length, LOOKAHEAD_TOKENS)
        blocks: npt.NDArray[np.float64] = np.ceil((length + expected - capacity) / block_size)
        return np.maximum(blocks, 0.0)
