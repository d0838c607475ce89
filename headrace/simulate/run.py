"""The real engine core on a simulated clock, in front of devices that only take as long as their model says."""

from __future__ import annotations

import dataclasses
import functools
import gc
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from core_engine.core import CoreConfig, EngineCore
from core_engine.engine import GC_THRESHOLDS
from core_engine.host_memory import HostMemorySpec
from core_engine.pressure import Wait, read_waits
from core_engine.request import Request
from headrace.simulate.copies import Copies
from headrace.simulate.device import Device
from headrace.simulate.gaps import GapHistogram
from headrace.simulate.timeline import CAUSES, Timeline
from headrace.simulate.trace import STOP_ID, TraceRequest, group_ids, prompt_ids
from shared.errors import ErrorCode, RequestError
from shared.messages import Epoch, Int32, Step, StepResult
from shared.sampling import SamplingParams

Floats: TypeAlias = npt.NDArray[np.float64]

FILLER_ID = 1
"""What outputs consist of, where it does not matter."""
NOTHING: Int32 = np.empty(0, np.int32)
NOT_YET = -1.0
TOO_LONG, QUEUE_FULL, CONNECTIONS = "too long", "the queue is full", "too many connections"
"""Why requests are refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trace. Arrays are by sequence, all choices of a request one after another; times in seconds."""

    sent: Floats
    scheduled: Floats
    first: Floats
    """When it got its first token; ``NOT_YET``: it was refused. So in the other two."""
    ended: Floats
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    """Its number in the trace."""
    gaps: GapHistogram
    timeline: Timeline
    refused: Counter[str]
    num_blocks: int
    """Usable ones, of all replicas."""
    steps: int
    step_tokens: int
    busy_s: float
    """Of all replicas together, the gaps between steps included."""
    preemptions: int
    recomputed_tokens: int
    """Computed once more after a preemption."""
    cache_queries: int
    cache_hits: int


class Simulator:
    """Runs one trace.

    Args:
        num_blocks: KV blocks of each replica, the null block included.
        host: those that each has in host memory; None: none.
        max_connections: requests at once that the gateway serves; more are refused.
        max_concurrency: requests at once that the clients send; more wait at them, which is in no latency.
        isolated: what a user's requests have cached is for that user alone.
    """

    def __init__(
        self,
        config: CoreConfig,
        device: Device,
        trace: SequenceOf[TraceRequest],
        *,
        num_blocks: int,
        host: HostMemorySpec | None = None,
        num_replicas: int = 1,
        max_connections: int | None = None,
        max_concurrency: int | None = None,
        isolated: bool = False,
    ) -> None:
        self.now = 0.0
        self.device = device
        self.trace = trace
        self._isolated = isolated
        self.timeline = Timeline()
        self.gaps = GapHistogram()
        self.refused: Counter[str] = Counter()
        self._core = EngineCore(config, clock=lambda: self.now)
        for number in range(num_replicas):
            self._core.begin_epoch(f"w{number}", Epoch(1, number), num_blocks, host)
        self._replicas = list(self._core.replicas)
        self._copies = [None if host is None else Copies(host) for _ in range(num_replicas)]
        self._free_at = [0.0] * num_replicas
        self._ends: list[tuple[float, int, int, float]] = []
        """Heap of the steps in flight: end, order, replica, time on the device."""
        self._max_connections = math.inf if max_connections is None else max_connections
        self._max_concurrency = math.inf if max_concurrency is None else max_concurrency
        choices = np.array([request.n for request in trace], np.int64)
        self._first_handle = np.concatenate([[0], np.cumsum(choices)])
        self._request = np.repeat(np.arange(len(trace)), choices)
        self._target = np.array([request.output for request in trace], np.int64)[self._request]
        self._sent, self._scheduled, self._first, self._last = (np.full(len(self._request), NOT_YET) for _ in range(4))
        self._output = np.zeros(len(self._request), np.int64)
        longest_tail = max((request.output for request in trace if request.tail), default=0)
        self._answers = np.full(
            (num_replicas, config.num_slots if longest_tail else 0, longest_tail), FILLER_ID, np.int32
        )
        self._next = self._live = self._order = self._steps = self._step_tokens = 0
        self._num_finished = self._num_output = self._preemptions = self._recomputed = 0
        self._busy_s = 0.0
        self._wait: Wait | None = None
        """What the first one that waits was not let in for, as the scheduler saw it last."""

    def run(self, on_finished: Callable[[int], object] = lambda count: None) -> Outcome:
        """Until everything has ended.

        Args:
            on_finished: called with the number of requests that have ended or were refused since the call before.
        """
        told = 0
        with quiet_collector():
            while (now := min(self._coming(), self._ends[0][0] if self._ends else math.inf)) < math.inf:
                self.now = max(self.now, now)
                while self._coming() <= self.now:
                    self._submit()
                while self._ends and self._ends[0][0] <= self.now:
                    self._settle(*heapq.heappop(self._ends)[2:])
                for index, replica in enumerate(self._replicas):
                    while (step := self._core.plan(replica)) is not None:
                        self._launch(index, step)
                self._note()
                done = self._num_finished + self.refused.total()
                on_finished(done - told)
                told = done
        return self._outcome()

    # -- requests --------------------------------------------------------------------------------------------------

    def _coming(self) -> float:
        """When the next request is sent."""
        if self._next == len(self.trace) or self._live >= self._max_concurrency:
            return math.inf
        return max(self.trace[self._next].arrival_s, 0.0)

    def _submit(self) -> None:
        index, entry = self._next, self.trace[self._next]
        self._next += 1
        if self._live >= self._max_connections:
            self.refused[CONNECTIONS] += 1
            return
        request = Request(
            rid=str(index),
            params=_params(entry.max_tokens or entry.output, entry.n),
            prompt=prompt_ids(entry, index),
            order=index,
            arrived_at=self.now,
            stop_ids=_STOPS,
            eos_ids=(STOP_ID,),
            priority=entry.priority,
            cache_salt=entry.user if self._isolated else "",
            tenant=entry.user,
        )
        try:
            sequences = self._core.submit(request, dict.fromkeys(range(entry.n), NOTHING))
        except RequestError as error:
            self.refused[QUEUE_FULL if error.code is ErrorCode.OVERLOADED else TOO_LONG] += 1
            return
        first = int(self._first_handle[index])
        for choice, sequence in enumerate(sequences):
            sequence.handle = first + choice
        self._sent[first : first + entry.n] = self.now
        self._live += 1

    # -- steps -----------------------------------------------------------------------------------------------------

    def _launch(self, index: int, step: Step) -> None:
        replica, copies = self._replicas[index], self._copies[index]
        load = replica.window[-1].load
        free_at = self._free_at[index]
        began = max(free_at, self.now + self.device.latency_s)
        copied_at = began if copies is None else copies.start(step, self.now)
        if not load.tokens:
            # Its result waits for the copies, and those of later steps are behind it.
            self._free_at[index] = max(began, copied_at)
            self._order += 1
            heapq.heappush(self._ends, (self._free_at[index], self._order, index, 0.0))
            return
        seconds = self.device.seconds(load)
        end = self._free_at[index] = began + self.device.gap_s + seconds
        self._busy_s += end - began
        self._steps += 1
        self._step_tokens += load.tokens
        self._order += 1
        heapq.heappush(self._ends, (end, self._order, index, seconds))
        for init in step.new:
            sequence = replica.slots.sequence_at(init.slot)
            if sequence.num_preemptions:
                self._recomputed += max(init.num_tokens - 1 - init.start, 0)
            if self._answers.size:
                self._prepare_answer(self._answers[index, init.slot], sequence.handle)

    def _prepare_answer(self, row: Int32, handle: int) -> None:
        """What will be sampled in a slot."""
        entry = self.trace[self._request[handle]]
        row[:] = FILLER_ID
        if entry.tail is not None:
            name, count = entry.tail
            row[: entry.output] = group_ids(name, count, entry.output)

    def _settle(self, index: int, seconds: float) -> None:
        replica = self._replicas[index]
        step = replica.window[0]
        copies, tokens = self._copies[index], self._sample(index, step.sampled)
        transferred = 0 if copies is None else copies.complete(step.number, self.now)
        result = StepResult(replica.epoch, step.number, tokens, NOTHING, compute_s=seconds, transferred=transferred)
        settled = self._core.settle(replica, result)
        handles = settled.rows[:, 0]
        is_first = settled.rows[:, 2] == 0
        if is_first.any():
            self._first[handles[is_first]] = self.now
            later = handles[~is_first]
            self.gaps.add(self.now - self._last[later])
        else:
            self.gaps.add(self.now - self._last[handles])
        self._last[handles] = self.now
        self._num_output += len(handles)
        for sequence in settled.finished:
            self._scheduled[sequence.handle] = sequence.scheduled_at
            self._output[sequence.handle] = sequence.num_generated
            self._preemptions += sequence.num_preemptions
            if sequence.request.finished:
                self._live -= 1
                self._num_finished += 1
                # They name each other: the collector need not find them.
                sequence.request.sequences = []

    def _sample(self, index: int, sampled: npt.NDArray[np.intp]) -> Int32:
        """The tokens of a step, one for each slot."""
        slots = self._replicas[index].slots
        made = slots.num_tokens[sampled] - slots.prompt_len[sampled]
        tokens: Int32 = np.full(len(sampled), FILLER_ID, np.int32)
        if self._answers.size:
            tokens[:] = self._answers[index, sampled, np.minimum(made, self._answers.shape[2] - 1)]
        tokens[made + 1 >= self._target[slots.handle[sampled]]] = STOP_ID
        return tokens

    # -- what is seen ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        used = running = 0
        for replica in self._replicas:
            used += replica.kv.pool.num_blocks - 1 - replica.kv.pool.num_free
            running += replica.num_running
        self._wait = read_waits(self._core, self._wait)
        self.timeline.add(
            self.now,
            running,
            len(self._core.waiting),
            used,
            self._step_tokens,
            self._num_output,
            self._core.metrics.preemptions.value,
            self._num_finished,
            CAUSES[self._wait],
        )

    def _outcome(self) -> Outcome:
        return Outcome(
            sent=self._sent,
            scheduled=self._scheduled,
            first=self._first,
            ended=self._last,
            prompt=np.array([request.prompt for request in self.trace], np.int64)[self._request],
            output=self._output,
            request=self._request,
            gaps=self.gaps,
            timeline=self.timeline,
            refused=self.refused,
            num_blocks=sum(replica.kv.pool.num_blocks - 1 for replica in self._replicas),
            steps=self._steps,
            step_tokens=self._step_tokens,
            busy_s=self._busy_s,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            cache_queries=sum(replica.cache_queries for replica in self._replicas),
            cache_hits=sum(replica.cache_hits for replica in self._replicas),
        )


_STOPS = frozenset({STOP_ID})


@functools.lru_cache(maxsize=4096)
def _params(max_tokens: int, n: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """As in the engine: what lives long is not looked at, and the rest less often."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
