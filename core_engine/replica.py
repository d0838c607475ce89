"""One worker in one epoch, as the engine keeps it: KV blocks, slots, the steps in flight.

A new epoch is a new ``Replica``; nothing of the old one is carried over but the tokens of its sequences.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

import numpy as np

from core_engine.beam_search import BeamSearch, beam_blocks
from core_engine.block import Block
from core_engine.host_memory import HostMemory
from core_engine.kv_cache_manager import KVCacheManager
from core_engine.pressure import Wait
from core_engine.request import Exit, Request, Sequence
from core_engine.slot_table import Slots, SlotTable
from core_engine.step_time import StepLoad, StepTimeModel
from core_engine.waiting_queue import WaitingQueue
from shared.messages import Epoch


@dataclasses.dataclass(frozen=True, slots=True)
class StepInFlight:
    """What settle needs to know of a step that was sent."""

    number: int
    rows: Slots
    """[rows] slots in the step: those of prefill rows, of decode rows, of forks."""
    sampled: Slots
    """[samples] slots that get a token, in the order of ``Step.sample``."""
    prefills: list[tuple[Sequence, int]]
    """Of prefill rows, then of forks: the sequence, and its tokens whose KV is written after the step."""
    load: StepLoad
    predicted_s: float | None
    """Time that it was planned for; None: its prefills were not cut by time, or it has none."""
    copied: list[Block] = dataclasses.field(default_factory=list)
    """Held until it is settled: what it copies."""


class Replica:
    """Sequences run in slots; ``request_exit`` and ``drained`` are the only ways out of one."""

    def __init__(
        self,
        name: str,
        epoch: Epoch,
        kv: KVCacheManager,
        slots: SlotTable,
        waiting: WaitingQueue,
        step_time: StepTimeModel,
        now: float,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.kv = kv
        self.slots = slots
        self.waiting = waiting
        self.step_time = step_time
        self.leaving = False
        """Its worker was asked to stop: it admits nothing more."""
        self.reserved_for: Request | None = None
        """The suspect that runs here alone."""
        self.progress_at = now
        """When the window was last empty, or a step was settled."""
        self.window: deque[StepInFlight] = deque()
        self.last_compute_s = 0.0
        """What the step that was settled last took on the device; 0: not known."""
        self.num_steps = 0
        self.compute_s = 0.0
        """What all settled steps took on the device."""
        self.cache_queries = 0
        """Tokens of sequences that got their first slot here."""
        self.cache_hits = 0
        """How many of them the prefix cache held."""
        self.prefilling: list[Sequence] = []
        """Admitted, with known tokens still to be planned; in the order of admission."""
        self.released: list[int] = []
        """Slots that were freed since the last step."""
        self.finished: list[Sequence] = []
        """Left for good since the last step."""
        self.preempted: list[Sequence] = []
        self.searches: list[BeamSearch] = []
        """Those whose prompt is admitted."""
        self.num_draining_preemptions = 0
        self.waits: Counter[Wait] = Counter()
        """What the first one that waits lacked, in each plan that left it waiting, since somebody looked."""
        self._decode_slots: Slots = np.empty(0, np.intp)
        self._joining: list[int] = []
        self._decode_changed = False

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot, those on their way out included."""
        return self.slots.num_slots - self.slots.num_free

    @property
    def is_idle(self) -> bool:
        """No sequence, no step in flight."""
        return not self.window and self.num_running == 0 and not self.searches

    @property
    def num_active(self) -> int:
        """Seats that are taken by sequences that go on, or start when they are back from host memory; a beam search
        takes those of all its beams from the start."""
        prompts = sum(sequence.request.search is None for sequence in self.prefilling)
        beams = sum(search.width for search in self.searches if not search.is_leaving)
        coming = 0 if self.kv.host is None else self.kv.host.num_seats
        return int(self.slots.decoding.sum()) + prompts + beams + coming

    def aboard(self) -> list[Sequence]:
        """Those that hold blocks: all that have a slot, and the leaders of searches between two steps."""
        return self.slots.occupied() + [search.leader for search in self.searches if search.is_pending]

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of its sequences that the prefix cache held, 0 to 1."""
        return self.cache_hits / self.cache_queries if self.cache_queries else 0.0

    def tables(self) -> list[list[Block]]:
        """Every block table that holds its blocks; between two steps those of beams without a slot, too."""
        pending = [beam.sequence for search in self.searches if search.is_pending for beam in search.beams]
        return [sequence.blocks for sequence in self.slots.occupied() + pending]

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and self.slots.sequences[sequence.slot] is sequence

    def may_hold(self, sequence: Sequence) -> bool:
        """Whether all of its memory is enough for the beams of a search; a sequence alone goes elsewhere in time."""
        search, kv = sequence.request.search, self.kv
        if search is None:
            return True
        most = beam_blocks(sequence.prompt_len, sequence.limit, search.width, kv.block_size)
        return most <= kv.pool.num_blocks - 1

    def decode_slots(self) -> Slots:
        """[d] slots to decode in this step, in the order in which they began to. A new array after each change."""
        if self._decode_changed:
            kept = self._decode_slots[self.slots.decoding[self._decode_slots]]
            joining = [slot for slot in self._joining if self.slots.decoding[slot]]
            self._decode_slots = np.concatenate([kept, np.array(joining, np.intp)])
            self._joining = []
            self._decode_changed = False
        return self._decode_slots

    def start_decoding(self, slot: int) -> None:
        self.slots.decoding[slot] = True
        self._joining.append(slot)
        self._decode_changed = True

    def stop_decoding(self, slots: Slots | int) -> None:
        self.slots.decoding[slots] = False
        self._decode_changed = True

    def request_exit(self, sequence: Sequence, exit: Exit) -> None:
        """Let a running sequence go: at once if no step names it, else in the settle of the last one that does.

        Finish and abort are final and win over a preemption that still drains. All beams of a search go together.
        """
        search = sequence.request.search
        if search is not None and search.replica is self:
            search.request_exit(exit)
        elif search is None or sequence.slot is not None:
            self.exit_slot(sequence, exit)

    def exit_slot(self, sequence: Sequence, exit: Exit) -> None:
        """``request_exit`` of this sequence alone."""
        slot = sequence.slot
        assert slot is not None, f"{sequence} does not run"
        if sequence.exit in (Exit.FINISH, Exit.ABORT):
            return
        self.num_draining_preemptions += (exit is Exit.PREEMPT) - (sequence.exit is Exit.PREEMPT)
        sequence.exit = exit
        self.slots.leaving[slot] = True
        self.slots.ended[slot] = exit is not Exit.PREEMPT
        self.stop_decoding(slot)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if self.slots.inflight[slot] == 0:
            self.drained(sequence)

    def drained(self, sequence: Sequence) -> None:
        """Take back the blocks and the slot of a leaving sequence that is in no step any more."""
        search, exit = sequence.request.search, sequence.exit
        if self.kv.host is not None and exit is Exit.PREEMPT and search is None:
            self._swap_out(self.kv.host, sequence)
        self.retire(sequence)
        if exit is Exit.PREEMPT:
            self.num_draining_preemptions -= 1
        if search is not None and search.replica is self:
            assert exit is not None
            search.left(sequence, exit)
            return
        if search is not None:
            self.searches.remove(search)
        if exit is Exit.PREEMPT:
            sequence.exit = None
            sequence.num_preemptions += 1
            self.preempted.append(sequence)
            if not sequence.resting:
                self.waiting.push(sequence)
        else:
            self.finished.append(sequence)

    def _swap_out(self, host: HostMemory, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        num_tokens = int(self.slots.num_tokens[slot])
        if sequence.prompt_records is None or num_tokens > sequence.prompt_len:  # else the prompt is scored once more
            host.swap_out(sequence, num_tokens, int(self.slots.num_computed[slot]))

    def retire(self, sequence: Sequence) -> None:
        """Take back the blocks and the slot of a sequence that is in no step any more."""
        self.kv.release(sequence)
        self.released.append(self.slots.leave(sequence))

    def evacuate(self) -> None:
        """The epoch is over: every sequence that has not ended waits again, with the tokens that were settled."""
        if self.kv.host is not None:
            self.kv.host.end()
            self.kv.host = None
        for step in self.window:
            self.kv.pool.release(step.copied)
        self.window.clear()
        self.slots.inflight[:] = 0
        for sequence in self.slots.occupied():
            if sequence.slot is None:
                continue  # it left with the other beams of its search
            if sequence.exit is None:
                self.request_exit(sequence, Exit.PREEMPT)
            else:
                self.drained(sequence)
        for search in list(self.searches):
            search.request_exit(Exit.PREEMPT)

    def going(self) -> list[Sequence]:
        """Sequences whose blocks come back without anybody's doing: they leave, or their last token is in flight."""
        slots = self.slots
        going = slots.leaving | ((slots.num_computed + 1 >= slots.limit) & (slots.limit > 0) & ~slots.searching)
        sequences: list[Sequence] = slots.sequences[going].tolist()
        return sequences

    def check(self) -> None:
        """Assert that slots, blocks and window agree; for tests and idle moments."""
        self.kv.pool.check()
        held: dict[int, int] = {}
        for table in self.tables():
            for block in table:
                held[block.id] = held.get(block.id, 0) + 1
                assert block.ref >= held[block.id]
        others = sum(len(step.copied) for step in self.window)
        if self.kv.host is not None:
            self.kv.host.check()
            others += len(self.kv.host.held())
        assert sum(held.values()) + others == self.kv.pool.num_references, "a block is held by nobody's table"
        inflight = np.zeros_like(self.slots.inflight)
        for step in self.window:
            inflight[step.rows] += 1
        assert (inflight == self.slots.inflight).all(), "a slot's counter and the window disagree"
