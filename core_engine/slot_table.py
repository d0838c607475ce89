"""The numbers of the running sequences of one worker as arrays by slot, so that a step costs array operations.

A sequence in slot s:

    tokens[s]   p p p p p p g g g . . . . .      prompt, generated
                          |   |     |
         num_computed ----+   |     |            KV that is written once the planned steps are done;
                              |     |            runs ahead of num_tokens by the samples in flight, less one
           num_tokens --------+     |            settled tokens
                limit --------------+            tokens at most
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from core_engine.request import Sequence

Slots: TypeAlias = npt.NDArray[np.intp]


class SlotTable:
    """``num_slots`` rows; those of empty slots are zero."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.tokens = np.zeros((num_slots, max_model_len), np.int32)
        self.handle = np.zeros(num_slots, np.int32)
        self.choice = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.capacity = np.zeros(num_slots, np.int64)
        """Tokens that the blocks of the slot hold."""
        self.limit = np.zeros(num_slots, np.int64)
        self.priority = np.zeros(num_slots, np.int64)
        self.order = np.zeros(num_slots, np.int64)
        self.arrived_at = np.zeros(num_slots, np.float64)
        self.recorded = np.zeros(num_slots, np.bool_)
        """Each of its tokens comes with a log-probability record."""
        self.searching = np.zeros(num_slots, np.bool_)
        """It computes for a beam search: what is sampled for it is not its next token, and it is not planned again."""
        self.inflight = np.zeros(num_slots, np.int64)
        """Steps that name the slot and are not settled."""
        self.decoding = np.zeros(num_slots, np.bool_)
        """Planned again with one token in each step: all but its last token is computed, and its limit not reached."""
        self.leaving = np.zeros(num_slots, np.bool_)
        """Its exit is set: not planned again, released when drained."""
        self.ended = np.zeros(num_slots, np.bool_)
        """Finished or aborted: what is still sampled for it is discarded."""
        self.sequences = np.full(num_slots, None, np.object_)
        """The ``Sequence`` in each slot, or None."""
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def occupied(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences.tolist() if sequence is not None]

    def enter(self, sequence: Sequence, num_computed: int, capacity: int) -> int:
        """Give ``sequence`` the slot that was freed last.

        Raises:
            IndexError: no slot is free.
        """
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        length = len(sequence.tokens)
        self.tokens[slot, :length] = sequence.tokens
        self.handle[slot] = sequence.handle
        self.choice[slot] = sequence.choice
        self.prompt_len[slot] = sequence.prompt_len
        self.num_tokens[slot] = length
        self.num_computed[slot] = num_computed
        self.capacity[slot] = capacity
        self.limit[slot] = sequence.limit
        self.priority[slot] = sequence.request.priority
        self.order[slot] = sequence.request.order
        self.arrived_at[slot] = sequence.request.arrived_at
        self.recorded[slot] = sequence.row_params.logprobs is not None
        self.searching[slot] = sequence.request.search is not None
        return slot

    def leave(self, sequence: Sequence) -> int:
        """Free the slot of a drained sequence; its tokens move back into it."""
        slot = sequence.slot
        assert slot is not None
        assert self.inflight[slot] == 0, f"{sequence} is still in a step"
        sequence.tokens = self.tokens[slot, : self.num_tokens[slot]].copy()
        sequence.slot = None
        self.sequences[slot] = None
        for column in (self.prompt_len, self.num_tokens, self.num_computed, self.capacity, self.limit):
            column[slot] = 0
        for flag in (self.decoding, self.leaving, self.ended, self.recorded, self.searching):
            flag[slot] = False
        self._free.append(slot)
        return slot

    def sequence_at(self, slot: int) -> Sequence:
        sequence: Sequence | None = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence
