"""plan(): which tokens each step computes. Pure bookkeeping; it sees neither tokens' values nor sockets.

There are no phases: ``num_computed`` chases ``num_tokens`` of each sequence under one token budget. Sequences that lack
one token go first (decode never starves behind prefill), then prompts that are partly computed, then waiting ones.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from core_engine.beam_search import BeamSearch
from core_engine.chunking import ChunkLimit, ChunkTarget
from core_engine.host_memory import HostMemory, let_go
from core_engine.making_way import who_gives_way
from core_engine.metrics import EngineMetrics
from core_engine.pressure import Wait
from core_engine.replica import Replica
from core_engine.request import Exit, Sequence
from core_engine.routing import Router
from core_engine.sharing import fork, forks_of, startable
from core_engine.slot_table import Slots
from core_engine.step_draft import Draft, commit
from core_engine.step_record import StepRecord
from core_engine.suspects import Suspects
from core_engine.waiting_queue import WaitingQueue
from shared.messages import Step


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
class _Room:
    """What is left of a step for newcomers, in tokens."""

    budget: int
    share: int
    """For each of several prompts."""
    partial: int
    """Prompts that are cut."""


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
        draft, host = Draft(), replica.kv.host
        if host is not None and host.loads:
            host.drop_inadmissible(replica.reserved_for, self.suspects.requests, is_leaving=replica.leaving)
        if self.waiting.preempts and self.waiting:
            self._make_way(replica)
        if replica.searches:
            self._plan_beams(replica, draft)
        decode = self._plan_decodes(replica, draft)
        num_rows = len(draft.beams) + len(decode)
        budget = min(self.config.max_num_batched_tokens - num_rows, self.config.max_prefill_tokens)
        draft.limit = self._limit(replica, decode)
        budget = self._plan_prefills(replica, draft, budget)
        if self.waiting and not replica.leaving:
            is_thrashing = draft.num_preempted or replica.num_draining_preemptions
            wait = Wait.LEAVING if is_thrashing else self._admit(replica, draft, budget)
            if self.waiting:
                replica.waits[wait] += 1
        self._fork(replica, draft)
        draft.prefills += [(beam, 1) for beam in draft.beams]
        if not draft.prefills and not len(decode):
            if host is None or not host.transfers.want_step(not replica.window):
                return None
        else:
            self.admission.stepped()
        if not replica.window:
            replica.progress_at = self._clock()
        return commit(replica, draft, decode, self._recorder)

    # -- beams -----------------------------------------------------------------------------------------------------

    def _plan_beams(self, replica: Replica, draft: Draft) -> None:
        """Go on with searches: all beams of one get slots, and blocks to write into, or none of them do."""
        pending = [search for search in replica.searches if search.is_pending]
        for search in sorted(pending, key=lambda search: self.waiting.rank(search.leader)):
            if search.is_pending and self._has_room(replica, draft, search):
                for beam in search.place():
                    slot = beam.slot
                    assert slot is not None
                    _, source = replica.kv.grow(beam)
                    replica.slots.capacity[slot] = len(beam.blocks) * replica.kv.block_size
                    draft.beams.append(beam)
                    draft.granted.add(slot)
                    draft.admitted.append((beam, len(beam.tokens) - 1))
                    draft.blocks += [(slot, block.id) for block in beam.blocks]
                    if source is not None:
                        draft.copies.append((source, beam.blocks[-1]))

    def _has_room(self, replica: Replica, draft: Draft, search: BeamSearch) -> bool:
        """Preempt until there is a block for each beam, or some are promised. Returns whether all have room now."""
        wanted = len(search.beams)
        if replica.slots.num_free < wanted or len(draft.beams) + wanted > self.config.max_num_batched_tokens:
            return False
        while replica.kv.pool.num_free < wanted:
            victim = None if replica.kv.promised(replica.going()) else self._victim(replica, draft)
            if victim is None:
                return False
            self._preempt(replica, draft, victim)
            if not search.is_pending:
                return False
        return True

    # -- running sequences that lack one token ---------------------------------------------------------------------

    def _plan_decodes(self, replica: Replica, draft: Draft) -> Slots:
        decode = replica.decode_slots()[: self.config.max_num_batched_tokens - len(draft.beams)]
        slots = replica.slots
        full = decode[slots.num_computed[decode] >= slots.capacity[decode]]
        if not len(full):
            return decode
        needy: list[Sequence] = slots.sequences[full].tolist()
        if len(needy) <= replica.kv.pool.num_free:
            for sequence in needy:
                self._append_block(replica, draft, sequence)
            slots.capacity[full] += replica.kv.block_size
            return decode
        for sequence in sorted(needy, key=self.waiting.rank):
            self._grow(replica, draft, sequence)
        if draft.stalled or draft.num_preempted:
            staying = slots.decoding[decode]
            staying[np.isin(decode, draft.stalled)] = False
            decode = decode[staying]
        return decode

    def _grow(self, replica: Replica, draft: Draft, sequence: Sequence) -> None:
        """Give a running sequence its next block, or leave it out of this step."""
        slot = sequence.slot
        if slot is None or sequence.exit is not None:
            return
        if replica.kv.pool.num_free == 0 and not self._make_room(replica, draft, sequence):
            if sequence.exit is None and sequence.slot is not None:
                draft.stalled.append(slot)
            return
        self._append_block(replica, draft, sequence)
        replica.slots.capacity[slot] += replica.kv.block_size
        draft.granted.add(slot)

    def _append_block(self, replica: Replica, draft: Draft, sequence: Sequence) -> None:
        block, source = replica.kv.grow(sequence)
        assert sequence.slot is not None
        draft.blocks.append((sequence.slot, block.id))
        if source is not None:
            draft.copies.append((source, block))

    def _make_room(self, replica: Replica, draft: Draft, sequence: Sequence) -> bool:
        """Preempt until a block is free or promised. Returns whether one is free now."""
        while replica.kv.pool.num_free == 0:
            if replica.kv.promised(replica.going()) > len(draft.stalled):
                return False
            victim = self._victim(replica, draft)
            if victim is None:
                return False
            self._preempt(replica, draft, victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, replica: Replica, draft: Draft, victim: Sequence) -> None:
        draft.num_preempted += 1
        self.admission.preempted()
        if victim.load is not None:
            victim.load.drop()
            return
        self._metrics.preemptions.inc()
        replica.request_exit(victim, Exit.PREEMPT)

    def _victim(self, replica: Replica, draft: Draft) -> Sequence | None:
        """The last in rank among those that could go on."""
        going = set(replica.going())
        candidates = [s for s in replica.aboard() if s not in going and s.slot not in draft.granted]
        if replica.kv.host is not None:
            candidates += replica.kv.host.loads
        return max(candidates, key=self.waiting.rank, default=None)

    def _make_way(self, replica: Replica) -> None:
        """Preempt what waiting sequences outrank, if they have to have its place."""
        admissible = self._admissible(replica)
        leaving = who_gives_way(replica, self.router.replicas, self.waiting, admissible, self.admission, self.config)
        for sequence in leaving:
            self._metrics.preemptions.inc()
            self._metrics.priority_preemptions.inc()
            replica.request_exit(sequence, Exit.PREEMPT)

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

    def _plan_prefills(self, replica: Replica, draft: Draft, budget: int) -> int:
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

    def _admit(self, replica: Replica, draft: Draft, budget: int) -> Wait:
        """Let waiting sequences in, in order, until the first that finds no slot, blocks or tokens; returns which."""
        config, slots, host = self.config, replica.slots, replica.kv.host
        partial = sum(count < self._missing(replica, sequence) for sequence, count in draft.prefills)
        partial += len(replica.prefilling) - len(draft.prefills)
        room = _Room(budget, self._share(replica, budget, draft.limit), partial)
        if host is not None and not self._admit_loaded(replica, draft, room, host):
            return Wait.BUDGET
        num_active = replica.num_active
        growth: float | None = None
        candidates = self._candidates(replica)
        while room.budget > 0 and num_active < config.max_num_seqs and slots.num_free:
            sequence = next(candidates, None)
            if sequence is None:
                return self._passed_over()
            if draft.limit is not None and not draft.limit.is_open:
                return Wait.BUDGET
            if num_active + sequence.request.num_seats > config.max_num_seqs:
                return Wait.SEATS
            growth = self.admission.expected_growth(replica) if growth is None else growth
            reserve = self.admission.reserve(replica, sequence, growth)
            if not replica.kv.may_fit(sequence, reserve):
                return self.admission.lacks(replica, sequence, reserve)
            must_wait, hits = (False, None) if host is None else host.begin_load(sequence, reserve)
            if must_wait:
                num_active += 0 if sequence.load is None else sequence.request.num_seats
                continue
            most = self._most(draft, room)
            num_cached = replica.kv.allocate(sequence, reserve=reserve, max_new_tokens=most, hits=hits)
            if num_cached is None:
                return self.admission.lacks(replica, sequence, reserve)
            growth += self.admission.own_growth(replica, sequence)
            self._start(replica, draft, sequence, num_cached, room)
            num_active += sequence.request.num_seats
        if num_active >= config.max_num_seqs:
            return Wait.SEATS
        return Wait.BUDGET if room.budget <= 0 else Wait.LEAVING

    def _passed_over(self) -> Wait:
        """What those wait for that this replica should not admit."""
        if self.suspects.requests:
            return Wait.SUSPECT
        return Wait.PLACEMENT if len(self.router.replicas) > 1 else Wait.SHARED

    def _admit_loaded(self, replica: Replica, draft: Draft, room: _Room, host: HostMemory) -> bool:
        """Let in those whose load is complete; they have their memory. Returns whether there is room for others."""
        for load in host.complete_loads():
            sequence, limit = load.sequence, draft.limit
            assert sequence is not None
            if room.budget <= 0 or not replica.slots.num_free or (limit is not None and not limit.is_open):
                return False
            most = self._most(draft, room)
            if most is not None and len(sequence.tokens) - load.num_loaded * replica.kv.block_size > most:
                return False
            num_loaded = (load.num_loaded - load.num_cached) * replica.kv.block_size
            self._start(replica, draft, sequence, load.admit(), room, num_loaded)
        return True

    def _most(self, draft: Draft, room: _Room) -> int | None:
        """Tokens that a newcomer may have to compute; None: it may be cut."""
        if self._may_be_cut(room):
            return None
        return room.budget if draft.limit is None else min(room.budget, draft.limit.room(0))

    def _may_be_cut(self, room: _Room) -> bool:
        return self.config.enable_chunked_prefill and room.partial < self.config.max_num_partial_prefills

    def _start(
        self, replica: Replica, draft: Draft, sequence: Sequence, num_cached: int, room: _Room, num_loaded: int = 0
    ) -> None:
        """Give a sequence that has its blocks a slot, and as much of the step as it may have.

        Args:
            num_loaded: of its ``num_cached`` tokens, those that came from host memory.
        """
        limit = draft.limit
        may_be_cut = self._may_be_cut(room)
        self._place(replica, draft, sequence, num_cached, num_loaded)
        count = missing = len(sequence.tokens) - num_cached
        if may_be_cut:
            count = self._chunk(replica, sequence, min(max(room.share, 1), room.budget), limit)
        elif limit is not None:
            limit.add(num_cached, count)
        draft.prefills.append((sequence, count))
        room.partial += count < missing
        room.budget -= count

    def _candidates(self, replica: Replica) -> Iterator[Sequence]:
        """The waiting sequences that this replica should admit (``startable``)."""
        self.waiting.refresh(self.router.replicas)
        admissible = functools.partial(self._admissible, replica)
        if len(self.router.replicas) > 1 and replica.reserved_for is None:
            yield from self.router.sequences_for(replica, admissible, self.config, self._clock())
        else:
            yield from startable(replica, admissible)

    def _admissible(self, replica: Replica) -> Iterable[Sequence]:
        found = self.suspects.admissible(replica, self.waiting) if self.suspects.requests else self.waiting
        return found if len(self.router.replicas) == 1 else filter(replica.may_hold, found)

    def _place(self, replica: Replica, draft: Draft, sequence: Sequence, num_cached: int, num_loaded: int) -> None:
        self.waiting.admit(sequence, num_cached)
        let_go(sequence)
        slot = replica.slots.enter(sequence, num_cached, len(sequence.blocks) * replica.kv.block_size)
        replica.prefilling.append(sequence)
        if sequence.request.search is not None:
            replica.searches.append(sequence.request.search)
        if sequence.scoring and sequence.prompt_records:
            sequence.prompt_records = []
        draft.admitted.append((sequence, num_cached))
        draft.blocks += [(slot, block.id) for block in sequence.blocks]
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._clock()
            sequence.cached_tokens = min(num_cached, sequence.prompt_len)
            host = replica.kv.host
            self._metrics.scheduled(sequence, num_loaded if host is not None and host.pool.is_tier else None)
            replica.cache_queries += len(sequence.tokens)
            replica.cache_hits += sequence.cached_tokens

    def _fork(self, replica: Replica, draft: Draft) -> None:
        """Start the other choices of the requests whose prompt is computed at the end of this step."""
        if replica.leaving or draft.num_preempted or replica.num_draining_preemptions:
            return
        most = self.config.max_num_seqs
        for sequence, count in draft.prefills:
            if len(sequence.request.sequences) == 1 or count < self._missing(replica, sequence):
                continue
            num_active = replica.num_active + len(draft.forks)
            for child in forks_of(replica, sequence, self.admission, most - num_active):
                self.waiting.admit(child, child.prompt_len)
                let_go(child)
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
