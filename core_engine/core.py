"""Requests, replicas and the bookkeeping between them: the engine without its sockets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from core_engine.admission import Admission
from core_engine.beam_search import BeamSearch, Found, num_recorded
from core_engine.block_pool import Forgotten
from core_engine.host_memory import HostMemorySpec, let_go, make_host_memory
from core_engine.kv_cache_manager import KVCacheManager
from core_engine.limits import search_limit, sequence_limit
from core_engine.metrics import EngineMetrics
from core_engine.queue_bounds import QueueBounds
from core_engine.queues import QUEUES
from core_engine.replica import Replica, StepInFlight
from core_engine.request import Exit, Request, Sequence
from core_engine.routing import Router
from core_engine.scheduler import Scheduler, SchedulerConfig
from core_engine.settle import Settled, StopTable, settle
from core_engine.slot_table import SlotTable
from core_engine.step_record import StepRecord, StepTiming
from core_engine.step_time import CPU_COSTS, StepTimeModel
from core_engine.suspects import Suspects
from core_engine.transfer_costs import TransferCosts
from core_engine.waiting_queue import AGEING_S
from shared.errors import ProtocolError, RequestError
from shared.messages import Epoch, FinishReason, Int32, Step, StepResult

_NO_IDS: Int32 = np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """What the bookkeeping needs to know."""

    scheduler: SchedulerConfig
    vocab_size: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    steps_in_flight: int = 2
    short_step_s: float = 0.002
    """One more step may be in flight while they take less than this."""
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int | None = None
    policy: str = "fcfs"
    priority_ageing_s: float = AGEING_S
    max_output_tokens: int | None = None
    """Of a sequence, whatever it asks for; None: any number."""
    eviction: str = "lru"
    swap_space: float = 0.0
    """Of the memory that workers have for KV blocks on their hosts, the part for preempted sequences; only what it is
    to ``kv_offloading_size`` counts."""
    kv_offloading_size: float = 0.0
    """The part for cached prefixes."""
    preemption_mode: str = "auto"

    @property
    def num_slots(self) -> int:
        """Slots of a worker: some spare ones, so that those that drain do not hold up newcomers."""
        return self.scheduler.max_num_seqs + max(2, self.scheduler.max_num_seqs // 16)


class EngineCore:
    """Waiting sequences, common to all replicas, and the replicas that are ready."""

    def __init__(
        self,
        config: CoreConfig,
        *,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: Callable[[StepRecord], None] | None = None,
        timer: Callable[[StepTiming], None] | None = None,
    ) -> None:
        self.config = config
        self._timer = timer
        self.clock = clock
        self.metrics = metrics or EngineMetrics(config.scheduler.max_model_len)
        self.waiting = QUEUES[config.policy](config.priority_ageing_s)
        self.replicas: list[Replica] = []
        self.steps_settled = 0
        """Of all replicas, since the start."""
        self.on_first_token: Callable[[Sequence], None] = lambda sequence: None
        """Called in ``settle`` for a sequence whose prompt is computed."""
        self.stops = StopTable(config.vocab_size)
        self.bounds = QueueBounds(config.max_num_queued_reqs, config.max_num_queued_tokens, self.metrics)
        self.suspects = Suspects(self.metrics)
        self.scheduler = Scheduler(
            config.scheduler,
            self.waiting,
            Router(self.replicas, Admission(config.watermark)),
            self.suspects,
            clock=clock,
            metrics=self.metrics,
            recorder=recorder,
        )

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes requests."""
        return any(not replica.leaving for replica in self.replicas)

    @property
    def kv_capacity(self) -> int | None:
        """Tokens that the smallest KV cache holds; None while no worker is ready."""
        return min((replica.kv.capacity for replica in self.replicas), default=None)

    def submit(self, request: Request, generated: dict[int, Int32], *, bounded: bool = True) -> list[Sequence]:
        """Queue choices of a request.

        Args:
            generated: for each choice to run, the ids that it has already.
            bounded: refuse if too many wait; otherwise what was accepted once is accepted again.

        Returns:
            Their sequences. One whose ids end it already, or that wants neither tokens nor its prompt scored, is not
            queued; its ``finish_reason`` is set.

        Raises:
            RequestError: it can never run, or the queue is full; nothing was queued.
        """
        limit = self._limit_of(request, self.kv_capacity)
        if request.params.beam_width is not None:
            self._check_search(request)
        if bounded and not any(ids.size for ids in generated.values()):
            seats = self.scheduler.config.max_num_seqs
            self.bounds.check(self.waiting, self.replicas, seats, len(generated), len(request.prompt))
        if request.params.beam_width is not None:
            return self._search(request, list(generated), limit)
        sequences = [Sequence(request, choice, ids, limit) for choice, ids in generated.items()]
        request.sequences += sequences
        for sequence in sequences:
            self.stops.add(request.stop_ids)
            length = len(sequence.tokens)
            ended = length > sequence.prompt_len or (sequence.silent and not sequence.scoring)
            end = sequence.end_of(int(sequence.tokens[-1]), length) if ended else None
            if end is None:
                self.waiting.push(sequence)
            else:
                sequence.stop_reason = end[1]
                self._ended(sequence, end[0])
        return sequences

    def _search(self, request: Request, choices: list[int], limit: int) -> list[Sequence]:
        """Queue a beam search, or add choices to one; what they have is found again."""
        sequences = [Sequence(request, choice, _NO_IDS, limit) for choice in choices]
        request.sequences += sequences
        for _ in sequences:
            self.stops.add(request.stop_ids)
        if sequences and (request.search is None or request.search.is_over):
            request.search = BeamSearch(request, sequences[0])
            self.waiting.push(sequences[0])
        return sequences

    def _check_search(self, request: Request) -> None:
        width, scheduler = request.params.beam_width, self.config.scheduler
        assert width is not None
        most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if width > most:
            raise RequestError(f"beam_width {width} > {most}, the sequences that run at the same time", "beam_width")
        if num_recorded(request) > self.config.vocab_size:
            raise RequestError(f"beam_width {width} is too large for the vocabulary", "beam_width")

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it is; its memory is back once no step names it. Nothing if it has ended."""
        if sequence.finish_reason is not None:
            return
        if sequence.request.search is not None:
            self._ended(sequence, reason)
            if sequence.request.finished:
                self._abandon(sequence.request.search)
            return
        self._abort(sequence)
        self._ended(sequence, reason)

    def _abandon(self, search: BeamSearch) -> None:
        """Nobody wants what a search finds."""
        if search.is_over:
            return
        if search.replica is not None:
            search.request_exit(Exit.ABORT)
        else:
            self._abort(search.leader)
        search.is_over = True

    def _abort(self, sequence: Sequence) -> None:
        """Take a sequence off its worker, or out of the queue, for good."""
        if sequence.slot is not None:
            self._replica_of(sequence).request_exit(sequence, Exit.ABORT)
        elif not sequence.resting:
            self.waiting.remove(sequence)
        let_go(sequence)

    def rename(self, sequence: Sequence, handle: int) -> None:
        """The front end has submitted the request again, under another handle."""
        sequence.handle = handle
        if sequence.slot is not None:
            self._replica_of(sequence).slots.handle[sequence.slot] = handle

    def rest(self, sequence: Sequence, resting: bool) -> None:
        """Take a sequence off its worker, or out of the queue, until it is called back. The choices of a search rest
        together."""
        if sequence.finish_reason is not None:
            return
        search = sequence.request.search
        runner = sequence if search is None else search.leader
        was_resting, sequence.resting, runner.resting = runner.resting, resting, resting
        if was_resting == resting:
            return
        if search is not None and search.replica is not None:
            if resting:
                search.request_exit(Exit.PREEMPT)
        elif runner.slot is not None:
            if resting:
                self._replica_of(runner).request_exit(runner, Exit.PREEMPT)
        elif resting:
            self.waiting.remove(runner)
            if runner.load is not None:
                runner.load.drop()
        else:
            self.waiting.push(runner)

    def reset_prefix_cache(self) -> Forgotten:
        """Forget every cached prefix on every replica and in its host memory; what was found, in blocks."""
        found = [replica.kv.forget_all() for replica in self.replicas]
        return Forgotten(*(sum(each) for each in zip(*found, strict=True))) if found else Forgotten(0, 0)

    def _limit_of(self, request: Request, kv_capacity: int | None) -> int:
        params, length, block_size = request.params, len(request.prompt), self.config.block_size
        limit = sequence_limit(
            length,
            params.max_tokens,
            max_model_len=self.config.scheduler.max_model_len,
            kv_capacity=kv_capacity,
            block_size=block_size,
            max_output_tokens=self.config.max_output_tokens,
        )
        if params.beam_width is None or kv_capacity is None:
            return limit
        is_fixed, num_blocks = params.max_tokens is not None, kv_capacity // block_size
        return search_limit(
            length, limit, params.beam_width, is_fixed=is_fixed, num_blocks=num_blocks, block_size=block_size
        )

    def _length_of(self, sequence: Sequence) -> int:
        if sequence.slot is None:
            return len(sequence.tokens)
        return int(self._replica_of(sequence).slots.num_tokens[sequence.slot])

    def _replica_of(self, sequence: Sequence) -> Replica:
        return next(replica for replica in self.replicas if sequence in replica)

    def _ended(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        sequence.ended_at = self.clock()
        sequence.num_generated = 0 if sequence.silent else self._length_of(sequence) - sequence.prompt_len
        self.stops.remove(sequence.request.stop_ids)
        if sequence.request.finished:
            self.suspects.forget(sequence.request)
            self.metrics.finished(sequence.request)

    # -- steps -----------------------------------------------------------------------------------------------------

    def plan(self, replica: Replica) -> Step | None:
        """The next step for a replica with credit left; None: no credit, or nothing to compute."""
        if self.suspects.requests:
            self.suspects.update(self.replicas)
        if len(replica.window) >= self.config.steps_in_flight + self._more_steps(replica):
            return None
        step = self.scheduler.plan(replica)
        self.bounds.planned(self.waiting)
        return step

    def _more_steps(self, replica: Replica) -> int:
        """One while a worker decodes faster than a result and the step behind it travel; none where steps are not to
        overlap."""
        is_short = 0.0 < replica.last_compute_s < self.config.short_step_s
        is_decoding = not any(step.prefills for step in replica.window)
        return int(is_short and is_decoding and self.config.steps_in_flight > 1)

    def settle(self, replica: Replica, result: StepResult) -> Settled:
        """Apply the result of the oldest step in flight.

        Raises:
            ProtocolError: it is not that; the epoch is over.
        """
        if not replica.window:
            raise ProtocolError(f"result of step {result.number}, but no step is in flight")
        step = replica.window[0]
        settled = settle(replica, step, result, self.stops)
        replica.window.popleft()
        self.steps_settled += 1
        if replica.kv.host is not None:
            replica.kv.host.transferred(result.transferred, replica.num_steps)
        self.waiting.served(settled.sequences + settled.searched)
        if not len(step.rows):
            replica.progress_at = self.clock()
            return settled
        for sequence, num_settled in step.prefills:
            if sequence.first_token_at is None and num_settled >= sequence.prompt_len:
                sequence.first_token_at = self.clock()
                self.on_first_token(sequence)
        if self._timer is not None:
            self._timer(_timing(replica, step, result, self.clock()))
        replica.progress_at = self.clock()
        replica.last_compute_s = result.compute_s
        replica.compute_s += result.compute_s
        replica.step_time.observe(step.load, result.compute_s)
        if step.predicted_s is not None:
            self.metrics.timed(step.predicted_s, result.compute_s)
        self.metrics.computed(result.compute_s, result.idle_s if len(step.rows) > len(step.prefills) else 0.0)
        for search in dict.fromkeys(sequence.request.search for sequence in settled.searched):
            if search is not None and (found := search.advance(replica)) is not None:
                settled.found.extend(self._found(search.request, found))
        num_generated = len(settled.tokens) + sum(len(found.ids) for _, found in settled.found)
        num_discarded = len(result.tokens) - len(settled.tokens) - len(settled.searched)
        self.metrics.stepped(step.load.tokens, num_generated, num_discarded)
        for sequence in settled.finished:
            assert sequence.finish_reason is not None
            self._ended(sequence, sequence.finish_reason)
        return settled

    def _found(self, request: Request, found: list[Found]) -> list[tuple[Sequence, Found]]:
        """End the choices of a search that is over with what it found."""
        delivered = []
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                each = found[sequence.choice]
                sequence.tokens = np.concatenate([request.prompt, np.array(each.ids, np.int32)])
                sequence.stop_reason = each.stop_reason
                self._ended(sequence, each.reason)
                delivered.append((sequence, each))
        return delivered

    # -- replicas --------------------------------------------------------------------------------------------------

    def begin_epoch(
        self, name: str, epoch: Epoch, num_blocks: int, host: HostMemorySpec | None = None
    ) -> list[tuple[Sequence, RequestError]]:
        """A worker is ready with ``num_blocks`` blocks.

        Args:
            host: its blocks in host memory; None: it has none.

        Returns:
            Waiting sequences that are longer than its KV cache; they have ended.
        """
        kv = KVCacheManager(
            num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            eviction=self.config.eviction,
        )
        slots = SlotTable(self.config.num_slots, self.config.scheduler.max_model_len)
        target = self.scheduler.config.chunk_target
        step_time = StepTimeModel(CPU_COSTS if target is None else target.prior)
        if host is not None:
            costs = TransferCosts(host.block_bytes, host.rates, step_time)
            shares = self.config.swap_space, self.config.kv_offloading_size
            kv.host = make_host_memory(kv, host, costs, shares, self.config.preemption_mode, self.metrics)
        self.replicas.append(Replica(name, epoch, kv, slots, self.waiting, step_time, self.clock()))
        self.metrics.epochs.inc()
        return self._refuse(list(self.waiting), self.kv_capacity)

    def refuse_homeless(self, among: Iterable[Sequence] | None = None) -> list[tuple[Sequence, RequestError]]:
        """End and return the waiting sequences that no worker has enough memory for, after the loss of one that had;
        without any worker none, as the next one may have it.

        Args:
            among: look at these alone, as they have come back to the queue; None: at all that wait.
        """
        if not self.replicas:
            return []
        most = max(replica.kv.capacity for replica in self.replicas)
        waiting = self.waiting if among is None else filter(_waits, among)
        return self._refuse([each for each in waiting if each.limit > most or each.request.search], most)

    def _refuse(self, waiting: list[Sequence], kv_capacity: int | None) -> list[tuple[Sequence, RequestError]]:
        """End those that do not fit a KV cache of so many tokens."""
        refused: list[tuple[Sequence, RequestError]] = []
        for sequence in waiting:
            try:
                sequence.limit = self._limit_of(sequence.request, kv_capacity)
                if len(sequence.tokens) >= sequence.limit:
                    raise RequestError(f"{len(sequence.tokens)} tokens do not fit the KV cache of a worker")
            except RequestError as error:
                for each in sequence.request.sequences if sequence.request.search is not None else [sequence]:
                    self.end(each, FinishReason.ERROR)
                refused.append((sequence, error))
        return refused

    def end_epoch(self, replica: Replica, *, blames: bool = True) -> Request | None:
        """A worker is lost: its sequences wait again, in order, with the tokens that they have.

        Args:
            blames: a request that was aboard may be the cause.

        Returns:
            A suspect that this convicts (``core_engine.suspects``); it is yours to end.
        """
        aboard = {slot for step in replica.window for slot in step.rows.tolist()}
        struck = [replica.slots.sequence_at(slot) for slot in aboard if not replica.slots.ended[slot]]
        replica.evacuate()
        self.replicas.remove(replica)
        return self.suspects.struck(struck if blames else (), replica, self.replicas)


def _timing(replica: Replica, step: StepInFlight, result: StepResult, now: float) -> StepTiming:
    """Of a step that has just left the window."""
    load = step.load
    return StepTiming(
        replica=replica.name,
        epoch=replica.epoch.counter,
        step=step.number,
        settled_at=now,
        wall_s=now - replica.progress_at,
        compute_s=result.compute_s,
        predicted_s=step.predicted_s,
        num_tokens=load.tokens,
        context=load.context,
        pairs=load.pairs,
        is_prefill=load.is_prefill,
        num_in_flight=len(replica.window),
    )


def _waits(sequence: Sequence) -> bool:
    """Whether it is in the queue. The leader of a search may be, although its choice was replaced by another."""
    search, is_over = sequence.request.search, sequence.finish_reason is not None
    if search is not None:
        is_over = sequence is not search.leader or search.replica is not None or search.is_over
    return not is_over and sequence.slot is None and not sequence.resting
