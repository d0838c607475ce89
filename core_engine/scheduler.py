"""plan(): which tokens each step computes. Pure bookkeeping; it sees neither tokens' values nor sockets.

There are no phases: ``num_computed`` chases ``num_tokens`` of each sequence under one token budget. Sequences that lack
one token go first (decode never starves behind prefill), then prompts that are partly computed, then waiting ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from core_engine.block import Block
from core_engine.chunking import ChunkLimit, ChunkTarget
from core_engine.metrics import EngineMetrics
from core_engine.queues import WaitingQueue
from core_engine.replica import Replica, StepInFlight
from core_engine.request import Exit, Sequence
from core_engine.routing import MOST_LOOKED_AT, Router
from core_engine.sharing import Underway, fork, forks_of
from core_engine.slot_table import Slots
from core_engine.step_record import RowRecord, StepRecord
from core_engine.step_time import StepLoad
from core_engine.suspects import Suspects
from shared.messages import Int32, SlotInit, Step

_NOTHING: Int32 = np.empty(0, np.int32)
_NO_COPIES: Int32 = np.empty((0, 2), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_num_partial_prefills: int = 1
    enable_chunked_prefill: bool = True
    chunk_target: ChunkTarget | None = None
    """None: chunks are cut by the token budget alone."""
    max_model_len: int


@dataclasses.dataclass(slots=True)
class _Draft:
    """A step while it is planned."""

    prefills: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    """Sequence, tokens to compute."""
    admitted: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    """Sequence, tokens of it that the prefix cache holds."""
    blocks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Slot, block."""
    forks: list[tuple[Sequence, Sequence]] = dataclasses.field(default_factory=list)
    """Sequence with a prefill row, another choice that samples from it too."""
    copies: list[tuple[Block, Block]] = dataclasses.field(default_factory=list)
    """Source, destination."""
    granted: set[int] = dataclasses.field(default_factory=set)
    """Slots that got a block to decode into: no longer to be preempted in this step."""
    stalled: list[int] = dataclasses.field(default_factory=list)
    """Slots that wait for blocks which leaving sequences will give back."""
    num_preempted: int = 0
    limit: ChunkLimit | None = None
    """None: nothing decodes beside the prefills, or there is no target to keep."""


class Scheduler:
    """Plans the steps of every replica; ``waiting`` is common to them."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        router: Router,
        suspects: Suspects,
        *,
        clock: Callable[[], float] = time.monotonic,
        metrics: EngineMetrics,
        recorder: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.config = config
        self.waiting = waiting
        self.router = router
        self.suspects = suspects
        self.admission = router.admission
        self._clock = clock
        self._metrics = metrics
        self._recorder = recorder

    def plan(self, replica: Replica) -> Step | None:
        """The next step of ``replica``, entered in its window as if each row will deliver; None: nothing to compute."""
        draft = _Draft()
        decode = self._plan_decodes(replica, draft)
        budget = min(self.config.max_num_batched_tokens - len(decode), self.config.max_prefill_tokens)
        draft.limit = self._limit(replica, decode)
        budget = self._plan_prefills(replica, draft, budget)
        if self.waiting and not (replica.leaving or draft.num_preempted or replica.num_draining_preemptions):
            self._admit(replica, draft, budget)
        self._fork(replica, draft)
        if not draft.prefills and not len(decode):
            return None
        self.admission.stepped()
        return self._commit(replica, draft, decode)

    # -- running sequences that lack one token ---------------------------------------------------------------------

    def _plan_decodes(self, replica: Replica, draft: _Draft) -> Slots:
        decode = replica.decode_slots()[: self.config.max_num_batched_tokens]
        slots = replica.slots
        full = decode[slots.num_computed[decode] >= slots.capacity[decode]]
        if not len(full):
            return decode
        needy: list[Sequence] = slots.sequences[full].tolist()
        if len(needy) <= replica.kv.pool.num_free:
            for sequence in needy:
                self._append_block(replica, draft, sequence)
            return decode
        for sequence in sorted(needy, key=_rank):
            self._grow(replica, draft, sequence)
        if draft.stalled or draft.num_preempted:
            staying = slots.decoding[decode]
            staying[np.isin(decode, draft.stalled)] = False
            decode = decode[staying]
        return decode

    def _grow(self, replica: Replica, draft: _Draft, sequence: Sequence) -> None:
        """Give a running sequence its next block, or leave it out of this step."""
        slot = sequence.slot
        if slot is None or sequence.exit is not None:
            return
        if replica.kv.pool.num_free == 0 and not self._make_room(replica, draft, sequence):
            if sequence.exit is None and sequence.slot is not None:
                draft.stalled.append(slot)
            return
        self._append_block(replica, draft, sequence)
        draft.granted.add(slot)

    def _append_block(self, replica: Replica, draft: _Draft, sequence: Sequence) -> None:
        block, source = replica.kv.grow(sequence)
        replica.slots.capacity[sequence.slot] += replica.kv.block_size
        assert sequence.slot is not None
        draft.blocks.append((sequence.slot, block.id))
        if source is not None:
            draft.copies.append((source, block))

    def _make_room(self, replica: Replica, draft: _Draft, sequence: Sequence) -> bool:
        """Preempt until a block is free or promised. Returns whether one is free now."""
        while replica.kv.pool.num_free == 0:
            if replica.kv.promised(replica.going()) > len(draft.stalled):
                return False
            victim = self._victim(replica, draft)
            if victim is None:
                return False
            draft.num_preempted += 1
            self.admission.preempted()
            self._metrics.preemptions.inc()
            replica.request_exit(victim, Exit.PREEMPT)
            if victim is sequence:
                return False
        return True

    def _victim(self, replica: Replica, draft: _Draft) -> Sequence | None:
        """The newest of the lowest priority among those that could go on."""
        going = set(replica.going())
        candidates = [s for s in replica.slots.occupied() if s not in going and s.slot not in draft.granted]
        return max(candidates, key=_rank, default=None)

    # -- prompts ---------------------------------------------------------------------------------------------------

    def _limit(self, replica: Replica, decode: Slots) -> ChunkLimit | None:
        """What prefills may add to a step with these decode rows."""
        target, model = self.config.chunk_target, replica.step_time
        num_prompts = len(replica.prefilling) + len(self.waiting)
        if target is None or not num_prompts or not len(decode):
            return None
        context = int(replica.slots.num_computed[decode].sum()) + len(decode)
        limit = ChunkLimit(target, model, num_decodes=len(decode), context=context, num_prompts=num_prompts)
        self._metrics.chunk_limit.set(limit.room(0))
        return limit

    def _plan_prefills(self, replica: Replica, draft: _Draft, budget: int) -> int:
        """Go on with prompts that are partly computed. Returns the tokens left."""
        limit = draft.limit
        share = self._share(replica, budget, limit)
        for sequence in replica.prefilling:
            if budget == 0 or (limit is not None and not limit.is_open):
                break
            count = self._chunk(replica, sequence, min(share, budget), limit)
            draft.prefills.append((sequence, count))
            budget -= count
        return budget

    def _chunk(self, replica: Replica, sequence: Sequence, budget: int, limit: ChunkLimit | None) -> int:
        """Tokens of a prompt that this step computes, 1 to ``budget``."""
        missing = self._missing(replica, sequence)
        if limit is None:
            return min(missing, budget)
        return limit.take(int(replica.slots.num_computed[sequence.slot]), missing, budget)

    def _admit(self, replica: Replica, draft: _Draft, budget: int) -> None:
        """Let waiting sequences in, in order, until the first that finds no slot, blocks or tokens."""
        config, slots = self.config, replica.slots
        partial = sum(count < self._missing(replica, sequence) for sequence, count in draft.prefills)
        partial += len(replica.prefilling) - len(draft.prefills)
        num_active = int(slots.decoding.sum()) + len(replica.prefilling)
        limit = draft.limit
        share = self._share(replica, budget, limit)
        candidates = self._candidates(replica)
        while budget > 0 and num_active < config.max_num_seqs and slots.num_free:
            sequence = next(candidates, None)
            if sequence is None or (limit is not None and not limit.is_open):
                return
            may_be_cut = config.enable_chunked_prefill and partial < config.max_num_partial_prefills
            reserve = self.admission.reserve(replica, sequence)
            if reserve >= replica.kv.pool.num_free:
                return
            whole = budget if limit is None else min(budget, limit.room(0))
            num_cached = replica.kv.allocate(sequence, reserve=reserve, max_new_tokens=None if may_be_cut else whole)
            if num_cached is None:
                return
            self._place(replica, draft, sequence, num_cached)
            missing = len(sequence.tokens) - num_cached
            if may_be_cut:
                count = self._chunk(replica, sequence, min(max(share, 1), budget), limit)
            else:
                count = missing
                if limit is not None:
                    limit.add(num_cached, count)
            draft.prefills.append((sequence, count))
            partial += count < missing
            budget -= count
            num_active += 1

    def _candidates(self, replica: Replica) -> Iterator[Sequence]:
        """The waiting sequences that this replica should admit, in order; each is taken before the next is asked for.

        None of them has to wait for a prompt that is being computed and that it will share.
        """
        if len(self.router.replicas) > 1 and replica.reserved_for is None:
            yield from self.router.sequences_for(replica, self._admissible(replica), self.config, self._clock())
            return
        underway, num_passed = Underway(replica), 0
        while num_passed < MOST_LOOKED_AT:
            sequence = next(itertools.islice(self._admissible(replica), num_passed, None), None)
            if sequence is None:
                return
            if underway.makes_wait(sequence):
                num_passed += 1
                continue
            yield sequence
            underway.add(sequence)

    def _admissible(self, replica: Replica) -> Iterable[Sequence]:
        return self.suspects.admissible(replica, self.waiting) if self.suspects.requests else self.waiting

    def _place(self, replica: Replica, draft: _Draft, sequence: Sequence, num_cached: int) -> None:
        self.waiting.remove(sequence)
        slot = replica.slots.enter(sequence, num_cached, len(sequence.blocks) * replica.kv.block_size)
        replica.prefilling.append(sequence)
        if sequence.scoring and sequence.prompt_records:
            sequence.prompt_records = []
        draft.admitted.append((sequence, num_cached))
        draft.blocks += [(slot, block.id) for block in sequence.blocks]
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._clock()
            sequence.cached_tokens = min(num_cached, sequence.prompt_len)
            self._metrics.scheduled(sequence)
            replica.cache_queries += len(sequence.tokens)
            replica.cache_hits += sequence.cached_tokens

    def _fork(self, replica: Replica, draft: _Draft) -> None:
        """Start the other choices of the requests whose prompt is computed at the end of this step."""
        if replica.leaving or draft.num_preempted or replica.num_draining_preemptions:
            return
        slots, most = replica.slots, self.config.max_num_seqs
        for sequence, count in draft.prefills:
            if len(sequence.request.sequences) == 1 or count < self._missing(replica, sequence):
                continue
            num_active = int(slots.decoding.sum()) + len(replica.prefilling) + len(draft.forks)
            for child in forks_of(replica, sequence, self.admission, most - num_active):
                self.waiting.remove(child)
                slot = fork(replica, sequence, child)
                draft.forks.append((sequence, child))
                draft.admitted.append((child, child.prompt_len))
                draft.blocks += [(slot, block.id) for block in child.blocks[: len(child.blocks) - child.borrows]]
                if child.scheduled_at is None:
                    child.scheduled_at = self._clock()
                self._metrics.forks.inc()

    def _share(self, replica: Replica, budget: int, limit: ChunkLimit | None) -> int:
        """Tokens of a step that one of several prompts may take, so that a short one passes a long one."""
        if limit is not None:
            budget = min(budget, max(limit.room(0), limit.least_chunk))
        prompts = min(self.config.max_num_partial_prefills, len(replica.prefilling) + len(self.waiting))
        return max(budget // max(prompts, 1), min(budget, 1))

    def _missing(self, replica: Replica, sequence: Sequence) -> int:
        return len(sequence.tokens) - int(replica.slots.num_computed[sequence.slot])

    # -- the step --------------------------------------------------------------------------------------------------

    def _commit(self, replica: Replica, draft: _Draft, decode: Slots) -> Step:
        """Advance the numbers as if every row will deliver its token, and write the step down."""
        slots = replica.slots
        replica.num_steps += 1
        computed = slots.num_computed[decode] + 1
        slots.num_computed[decode] = computed
        exhausted = decode[computed + 1 >= slots.limit[decode]]
        if len(exhausted):
            replica.stop_decoding(exhausted)
        prefill, complete = self._commit_prefills(replica, draft)
        rows = sampled = decode
        sample = np.empty((len(complete) + len(decode), 2), np.int32)
        sample[:, 0] = np.arange(len(prefill) - len(complete), len(prefill) + len(decode))
        if len(prefill):
            rows = np.concatenate([prefill[:, 0], decode])
            sample[: len(complete), 0] = complete
            sampled = rows[sample[:, 0]]
        sample[:, 1] = sampled
        if draft.forks:
            forks = self._commit_forks(replica, draft)
            sample = np.concatenate([sample, forks.astype(np.int32)])
            rows, sampled = np.concatenate([rows, forks[:, 1]]), np.concatenate([sampled, forks[:, 1]])
        slots.inflight[rows] += 1
        step = Step(
            epoch=replica.epoch,
            number=replica.num_steps,
            new=[_slot_init(sequence, num_cached) for sequence, num_cached in draft.admitted],
            new_tokens=_joined([sequence.tokens for sequence, _ in draft.admitted]),
            prefill=prefill.astype(np.int32),
            decode=decode.astype(np.int32),
            sample=sample,
            blocks=np.array(draft.blocks, np.int32).reshape(-1, 2),
            released=np.array(replica.released, np.int32),
            copies=_copies(draft.copies),
        )
        starting = [sequence for sequence, _ in draft.prefills] + [child for _, child in draft.forks]
        ends = [(sequence, int(slots.num_computed[sequence.slot])) for sequence in starting]
        load = _load(prefill, len(decode), int(computed.sum()))
        predicted_s = draft.limit.predicted_s if draft.limit is not None and draft.prefills else None
        if not replica.window:
            replica.progress_at = self._clock()
        copied = [source for source, _ in draft.copies]
        replica.window.append(StepInFlight(step.number, rows, sampled, ends, load, predicted_s, copied))
        if self._recorder is not None:
            self._recorder(_record(replica, draft, decode))
        replica.released, replica.finished, replica.preempted = [], [], []
        return step

    def _commit_prefills(self, replica: Replica, draft: _Draft) -> tuple[Slots, list[int]]:
        """([p, 3] slot, start, count; indices of the rows that complete their sequence)."""
        prefill = np.empty((len(draft.prefills), 3), np.intp)
        complete: list[int] = []
        slots = replica.slots
        for index, (sequence, count) in enumerate(draft.prefills):
            slot = sequence.slot
            assert slot is not None
            prefill[index] = slot, slots.num_computed[slot], count
            slots.num_computed[slot] += count
            if slots.num_computed[slot] == slots.num_tokens[slot]:
                complete.append(index)
                replica.prefilling.remove(sequence)
                if slots.num_tokens[slot] + 1 < slots.limit[slot]:
                    replica.start_decoding(slot)
        return prefill, complete

    def _commit_forks(self, replica: Replica, draft: _Draft) -> Slots:
        """[f, 2] forward row, slot of each fork."""
        slots = replica.slots
        row_of = {sequence: row for row, (sequence, _) in enumerate(draft.prefills)}
        forks = np.empty((len(draft.forks), 2), np.intp)
        for index, (parent, child) in enumerate(draft.forks):
            slot = child.slot
            assert slot is not None
            forks[index] = row_of[parent], slot
            if slots.num_tokens[slot] + 1 < slots.limit[slot]:
                replica.start_decoding(slot)
        return forks


def _load(prefill: Slots, num_decodes: int, context: int) -> StepLoad:
    """``prefill`` [p, 3]: slot, start, count."""
    if not len(prefill):
        return StepLoad(num_decodes, context, 0.0, False)
    starts, counts = prefill[:, 1], prefill[:, 2]
    return StepLoad(int(counts.sum()) + num_decodes, context, float((counts * (starts + counts / 2)).sum()), True)


def _slot_init(sequence: Sequence, num_cached: int) -> SlotInit:
    request, params = sequence.request, sequence.request.params
    assert sequence.slot is not None
    if params.prompt_logprobs is not None and not sequence.scoring:
        params = dataclasses.replace(params, prompt_logprobs=None)
    return SlotInit(
        slot=sequence.slot,
        rid=request.rid,
        choice=sequence.choice,
        num_tokens=len(sequence.tokens),
        prompt_len=sequence.prompt_len,
        start=num_cached,
        limit=sequence.limit,
        params=params,
        eos_ids=list(request.eos_ids),
    )


def _record(replica: Replica, draft: _Draft, decode: Slots) -> StepRecord:
    prefills = [(sequence, count, True) for sequence, count in draft.prefills]
    decodes = [(replica.slots.sequence_at(slot), 1, False) for slot in decode.tolist()]
    rows = [
        RowRecord(s.request.rid, s.choice, count, is_prefill, [block.id for block in s.blocks])
        for s, count, is_prefill in prefills + decodes
    ]
    return StepRecord(
        replica=replica.name,
        epoch=replica.epoch.counter,
        step=replica.num_steps,
        rows=rows,
        finished=[sequence.request.rid for sequence in replica.finished],
        preempted=[sequence.request.rid for sequence in replica.preempted],
        num_tokens=sum(row.num_tokens for row in rows),
        num_prefills=len(prefills),
        num_decodes=len(decodes),
    )


def _rank(sequence: Sequence) -> tuple[int, tuple[int, int]]:
    """Orders running sequences: the last one is the first to be preempted."""
    return sequence.request.priority, sequence.arrival


def _copies(pairs: list[tuple[Block, Block]]) -> Int32:
    return np.array([(source.id, block.id) for source, block in pairs], np.int32) if pairs else _NO_COPIES


def _joined(arrays: list[Int32]) -> Int32:
    return np.concatenate(arrays) if arrays else _NOTHING
