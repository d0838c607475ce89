"""The link to the process that serves us, a tokenizer or an engine: the parent side of the hop, without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from api_gateway.calls import Calls
from core_engine.engine_config import max_num_seqs_for
from headrace.offline.jobs import Job, Sink
from headrace.offline.latency import Latency
from shared.config import Settings
from shared.errors import ErrorCode
from shared.hop import Log, Parent, Request, RunningClock, Timers
from shared.links import process_name, speaks_our_protocol
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Attempt,
    Detokenized,
    End,
    ErrorInfo,
    FinishReason,
    Hello,
    Load,
    Message,
    ModelCard,
    Tokenized,
)
from shared.transport import Connector, Pump, Received, new_boot

MAX_UNCONFIRMED = 256
"""Requests that were sent and not yet answered: fewer than a socket's high-water mark."""
ABORTS_AT_ONCE, ABORT_PAUSE_S = 128, 0.05
MIN_WINDOW = 1024
HELLO_S = 0.05
"""Between two Hellos until the first answer."""
SETTLED = 2
"""Reports after the last rows that say nothing new: an engine repeats its latest one to whoever says Hello."""
LOST_S = 60.0
"""When the child says nothing for this long, running requests end with an error."""


class EngineLink:
    """All requests of one ``LLM``. Made and used in the event loop of its thread.

    Any number of jobs may be submitted: they are sent in the order of priority and arrival, as many as the engine can
    use at a time, so that none is refused because its queue is full.

    Args:
        endpoint: where the child listens.
        on_ready: called when the child says for the first time that it is ready.
    """

    def __init__(self, settings: Settings, endpoint: str, on_ready: Callable[[ModelCard], None]) -> None:
        self._endpoint = endpoint
        self._on_ready = on_ready
        self._name = process_name(settings)
        self._beat_s = settings.beat_s
        num_seqs = max_num_seqs_for(settings, settings.device)
        self._window = min(settings.max_num_queued_reqs, max(MIN_WINDOW, 4 * num_seqs))
        boot = new_boot()
        self._connector = Connector(endpoint, identity=f"llm/{boot:x}", boot=boot)
        self._pump = Pump(self._connector, self._on_message)
        self._clock = RunningClock(time.monotonic)
        self._hello_at = self._heard_at = self._clock()
        self._hello: Hello | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}
        self._known: set[str] = set()
        """Request ids of all jobs that are not over."""
        self._closing: deque[Request] = deque()
        """Aborted requests that the child was not told of."""
        self._is_closing = False
        self._unconfirmed: set[str] = set()
        self._choices = 0
        """Of the jobs that were sent."""
        self.card: ModelCard | None = None
        """Of the model, once the child was ready."""
        self.refusal: str | None = None
        """Why we cannot work with the child."""
        self.loads: dict[str, tuple[Load, float]] = {}
        """The latest report of each process, and its monotonic time."""
        self._reports = 0
        self.latency = Latency()
        self.parent = Parent(
            send=self._send,
            clock=self._clock,
            timers=Timers(settings.beat_s, settings.lease_s),
            events=self,
            children=[endpoint],
        )
        self.calls = Calls(self._send, self._ready_names, settings.beat_s)

    def start(self) -> None:
        self._pump.start()
        self._keeper = asyncio.create_task(self._keep_time())

    def stop(self, error: ErrorInfo) -> None:
        """End what runs with an error, and close the link."""
        if self._keeper is not None:
            self._keeper.cancel()
        self.fail_all(error)
        self._pump.stop()
        self._connector.close()

    @property
    def status(self) -> str:
        """What the child is doing, in words, while it is not ready."""
        return self._hello.status if self._hello is not None else ""

    @property
    def is_reported(self) -> bool:
        """Whether an engine's report counts all rows that have arrived."""
        return self._reports >= SETTLED

    # -- what callers ask for ----------------------------------------------------------------------------------------

    def submit(self, jobs: Iterable[Job]) -> None:
        """Have jobs served; each ends with a call of its sink's ``over``."""
        for job in sorted(jobs, key=lambda job: job.priority):
            if job.request_id in self._known:
                job.error = ErrorInfo(
                    ErrorCode.INVALID_REQUEST, f"request_id {job.request_id!r} is in use", "request_id"
                )
                job.over = True
                job.sink.over(job)
                job.sink.flush()
            else:
                self._known.add(job.request_id)
                self._waiting.append(job)
        self._admit()
        self.parent.flush()

    def abort(self, jobs: Iterable[Job], *, tell: bool = False) -> None:
        """Stop jobs that are not over. ``tell``: their sinks hear it, and their choices end with ``abort``."""
        going = [job for job in jobs if not job.over]
        for job in going:
            if job.request is not None:
                for log in job.request.logs:
                    log.end = log.end or End(FinishReason.ABORT)
                self._closing.append(job.request)
            self._finish(job)
            if tell:
                job.sink.over(job)
                job.sink.flush()
        if any(job.request is None for job in going):
            self._waiting = deque(job for job in self._waiting if not job.over)
        if not self._is_closing:
            self._close_some()
        self._admit()
        self.parent.flush()

    def find(self, request_ids: Iterable[str]) -> list[Job]:
        """The jobs with these ids that are not over."""
        wanted = self._known & set(request_ids)
        return [job for job in [*self._jobs.values(), *self._waiting] if job.request_id in wanted]

    def fail_all(self, error: ErrorInfo) -> None:
        """End every job with an error."""
        jobs = [*self._jobs.values(), *self._waiting]
        self._waiting.clear()
        for job in jobs:
            if job.request is not None:
                self.parent.close(job.request)
            self._fail(job, error)
        for sink in {job.sink: None for job in jobs}:
            sink.flush()

    # -- sending -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Send what has room. A job with more choices than the window is sent alone."""
        while self._waiting and len(self._unconfirmed) < MAX_UNCONFIRMED:
            job = self._waiting[0]
            if self._jobs and self._choices + job.n > self._window:
                return
            self._waiting.popleft()
            request = job.request = Request(job.request_id, job.spec)
            request.context = job
            self._jobs[job.request_id] = job
            self._unconfirmed.add(job.request_id)
            self._choices += job.n
            self.parent.place(request, job.spec, Attempt(1, new_boot(), 0))

    def _close_some(self) -> None:
        """Tell the child of requests that were aborted, no faster than a busy engine reads: what is lost between would
        run on until its lease ends."""
        for _ in range(min(len(self._closing), ABORTS_AT_ONCE)):
            self.parent.close(self._closing.popleft())
        self._is_closing = bool(self._closing)
        if self._is_closing:
            asyncio.get_running_loop().call_later(ABORT_PAUSE_S, self._close_some)

    def _finish(self, job: Job) -> None:
        job.over = True
        job.finished_at = time.time()
        self._known.discard(job.request_id)
        if self._jobs.pop(job.request_id, None) is not None:
            self._choices -= job.n
            self._unconfirmed.discard(job.request_id)

    def _fail(self, job: Job, error: ErrorInfo) -> None:
        job.error = error
        self._finish(job)
        job.sink.over(job)

    # -- what the hop reports ----------------------------------------------------------------------------------------

    def accepted(self, request: Request) -> None:
        self._unconfirmed.discard(request.rid)

    def grew(self, growths: Sequence[tuple[Log, int]]) -> None:
        """All rows of one message: each sink is woken once."""
        now = time.time()
        self._reports = 0
        sinks: dict[Sink, None] = {}
        for log, first in growths:
            job: Job = log.request.context
            if job.over:
                continue
            count = len(log.ids) - first
            if count:
                self.latency.tokens(job, now, count)
            job.sink.grew(job, log, first)
            sinks[job.sink] = None
            if log.end is not None and log.request.over:
                self._on_over(job, log)
        for sink in sinks:
            sink.flush()

    def superseded(self, request: Request, live: Attempt) -> None:
        self._fail(request.context, ErrorInfo(ErrorCode.LOST, "the request is served for somebody else"))
        request.context.sink.flush()

    def _on_over(self, job: Job, log: Log) -> None:
        if log.end is not None and log.failed:
            job.error = log.end.error or ErrorInfo(ErrorCode.INTERNAL, "the request failed")
        self._finish(job)
        self.latency.over(job)
        job.sink.over(job)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, _name: str, message: Message) -> bool:
        return self._connector.send(message)

    def _ready_names(self) -> list[str]:
        return [self._endpoint] if self._hello is not None and self._hello.ready else []

    def _on_message(self, received: Received) -> None:
        self._heard_at = self._clock()
        self.parent.receive(received.peer, received.boot, received.message)
        match received.message:
            case Hello() as hello:
                self._on_hello(hello)
            case Load() as load:
                self._on_load(load)
            case Tokenized() | Detokenized() as answer:
                self.calls.on_answer(answer)
        self._admit()
        self.parent.flush()

    def _on_load(self, load: Load) -> None:
        before, _ = self.loads.get(load.source, (None, 0.0))
        self.loads[load.source] = load, time.monotonic()
        if load.source.startswith("engine/"):
            self._reports += 1 if before is not None and before.metrics == load.metrics else SETTLED

    def _on_hello(self, hello: Hello) -> None:
        self._hello = hello
        self.refusal = hello.refusal if speaks_our_protocol(hello) else "it speaks another protocol"
        if hello.ready and hello.card is not None and self.card is None and self.refusal is None:
            self.card = hello.card
            self._on_ready(hello.card)

    # -- time --------------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(self._beat_s / 4 if self._hello is not None else HELLO_S)

    def _tick(self) -> None:
        now = self._clock()
        if self._hello is None or now - self._hello_at >= self._beat_s:
            self._hello_at = now
            self._connector.send(Hello("llm", self._name, OLDEST_PROTOCOL, PROTOCOL_VERSION, True, None, self.refusal))
        self.parent.tick()
        self._admit()
        self.parent.flush()
        self.calls.tick()
        if self._jobs and now - self._heard_at > LOST_S:
            self.fail_all(ErrorInfo(ErrorCode.UNAVAILABLE, f"the engine has not answered for {LOST_S:g} s"))
