"""The link to tokenizers: requests come in, token deltas go out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import structlog

from core_engine.beam_search import Found
from core_engine.core import EngineCore
from core_engine.deadlines import Deadlines
from core_engine.metrics import kv_usage
from core_engine.request import Request, Sequence, stop_ids_of
from core_engine.settle import Settled
from core_engine.stall import StallWatch
from shared.errors import ErrorCode, RequestError
from shared.hop import ENGINE, EngineChild, Log, RunningClock, Timers
from shared.hop import Request as HopRequest
from shared.messages import (
    End,
    ErrorInfo,
    FinishReason,
    Hello,
    Int32,
    Load,
    PrefixCacheReset,
    PromptInfo,
    ResetPrefixCache,
    TokenSpec,
)
from shared.sampling import check_token_ids
from shared.transport import Listener

log: structlog.stdlib.BoundLogger = structlog.get_logger()

LOAD_S = 0.25
"""Between two Load messages while something changes."""
MOST_AT_ONCE = 256
"""Messages that are taken from the socket in one turn of the loop."""
FORGET_BEATS = 10


class FrontendLink:
    """The engine's side of the hop: turns requests of the hop into sequences, and settled steps into their logs."""

    def __init__(
        self,
        listener: Listener,
        core: EngineCore,
        *,
        name: str,
        timers: Timers,
        clock: RunningClock,
        recompute: bool,
        eos_ids: tuple[int, ...],
        make_hello: Callable[[Hello | None], Hello],
    ) -> None:
        self.listener = listener
        self.core = core
        self._source = f"engine/{name}"
        self._timers = timers
        self._clock = clock
        self._eos_ids = eos_ids
        self._make_hello = make_hello
        self._num_requests = 0
        self._stall = StallWatch(core, clock)
        self._deadlines = Deadlines(core.clock)
        self._peers: dict[str, float] = {}
        """Identity, when it last said Hello."""
        self._load: Load | None = None
        self._load_due = 0.0
        self._beat_due = 0.0
        self.child = EngineChild(
            send=listener.send, clock=clock, timers=timers, events=self, role=ENGINE, recompute=recompute
        )
        core.on_first_token = self._on_first_token

    # -- the loop's side -------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take what has arrived, up to a bound."""
        for _ in range(MOST_AT_ONCE):
            received = self.listener.receive() if self.listener.readable else None
            if received is None:
                return
            if isinstance(received.message, Hello):
                self._on_hello(received.peer, received.message)
            elif isinstance(received.message, ResetPrefixCache):
                found = self.core.reset_prefix_cache()
                blocks = {"blocks": found.num_free, "still_held": found.num_held, "in_host_memory": found.num_host}
                log.info("prefix cache forgotten", **blocks)
                call = received.message.call
                reset = PrefixCacheReset(call, found.num_free, found.num_held, num_host=found.num_host)
                self.listener.send(received.peer, reset)
            else:
                self.child.receive(received.peer, received.boot, received.message)

    def deliver(self, settled: Settled) -> None:
        """Write what a step gave into the logs, and send it; ``flush`` sends what is left."""
        logs = [sequence.context for sequence in settled.sequences]
        self.child.append_rows(logs, settled.rows, settled.tokens, settled.records)
        for sequence in settled.finished:
            self._finish(sequence)
        for sequence, found in settled.found:
            self._deliver_whole(sequence, found)

    def _deliver_whole(self, sequence: Sequence, found: Found) -> None:
        """A choice of a beam search. It goes on from what the front end has of it if that is the same."""
        item: Log = sequence.context
        held = len(item.ids)
        if item.ids.tolist() != found.ids[:held]:
            error = RequestError("the search found something else when it was done again", code=ErrorCode.LOST)
            self.child.fail(item.request, _error_info(error))
            return
        self.child.extend(item, found.ids[held:], found.records[held:])
        self._finish(sequence)

    def expire(self) -> None:
        """End requests whose time is over; call it before each plan, which is then for none of them."""
        for request in self._deadlines.expired():
            error = RequestError("the request was not done within its timeout", code=ErrorCode.TIMEOUT)
            self.fail(request.sequences[-1], error)

    def flush(self) -> None:
        """One TokenDelta to each front end that has news."""
        self.child.flush()

    def tick(self) -> None:
        """Leases, and the load; call it several times a beat."""
        self.child.tick()
        now = self._clock()
        if now >= self._load_due:
            self._load_due = now + min(LOAD_S, self._timers.beat_s)
            self._send_load(now)

    def fail(self, sequence: Sequence, error: RequestError) -> None:
        """End a whole request with an error."""
        self._fail(sequence.context.request, sequence.request, error)

    def announce(self) -> None:
        """Say Hello to everybody: readiness has changed."""
        for peer in self._peers:
            self.listener.send(peer, self._make_hello(None))

    # -- what the child tells --------------------------------------------------------------------------------------

    def begin(self, request: HopRequest) -> None:
        try:
            accepted = self._accepted(request)
            request.context = accepted
            self._start(accepted, [item for item in request.logs if item.end is None], bounded=True)
        except RequestError as error:
            self._refuse(request, error)
            return
        self.child.accept(request, len(accepted.prompt))
        self._keep_deadline(request)

    def replaced(self, old: Log, new: Log) -> None:
        before = old.context if isinstance(old.context, Sequence) else None
        if before is not None and before.request.search is None:
            self.core.rest(before, True)  # the queue holds each choice once
        if isinstance(new.request.context, Request) and new.end is None:
            try:
                self._start(new.request.context, [new], bounded=False)
            except RequestError as error:
                log.info("refused", request_id=new.request.rid, reason=error.message)
                self._fail(new.request, new.request.context, error)
        if before is not None:  # last, so that the request goes on, and counts once
            self.core.end(before, FinishReason.ABORT)

    def resubmitted(self, request: HopRequest) -> None:
        for item in request.logs:
            if isinstance(item.context, Sequence):
                self.core.rename(item.context, item.handle)
        if isinstance(request.context, Request):
            self.child.accept(request, len(request.context.prompt))
            self._keep_deadline(request)

    def unwanted(self, item: Log) -> None:
        if isinstance(item.context, Sequence):
            self.core.end(item.context, FinishReason.STOP)

    def rested(self, request: HopRequest, resting: bool) -> None:
        for item in request.logs:
            if isinstance(item.context, Sequence):
                self.core.rest(item.context, resting)
        if not resting and isinstance(request.context, Request):
            for sequence, error in self.core.refuse_homeless(request.context.sequences):
                self.fail(sequence, error)

    def dropped(self, request: HopRequest) -> None:
        for item in request.logs:
            if isinstance(item.context, Sequence) and item.context.finish_reason is None:
                log.debug("aborted", request_id=request.rid, choice=item.choice)
                self.core.end(item.context, FinishReason.ABORT)

    def _accepted(self, request: HopRequest) -> Request:
        """The request as the core wants it.

        Raises:
            RequestError: a field of it is out of range.
        """
        spec = request.spec
        assert isinstance(spec, TokenSpec)
        prompt: Int32 = np.frombuffer(spec.prompt, "<i4")
        spec.params.validate(self.core.config.vocab_size)
        self._check_ids(prompt, "prompt")
        self._num_requests += 1
        return Request(
            rid=request.rid,
            params=spec.params,
            prompt=prompt,
            order=self._num_requests,
            arrived_at=self.core.clock(),
            stop_ids=stop_ids_of(spec.params, self._eos_ids),
            eos_ids=self._eos_ids,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            tenant=spec.tenant,
        )

    def _start(self, request: Request, logs: list[Log], *, bounded: bool) -> None:
        generated = {item.choice: np.array(item.ids, np.int32) for item in logs}
        for ids in generated.values():
            self._check_ids(ids, "tokens")
        sequences = self.core.submit(request, generated, bounded=bounded)
        for item, sequence in zip(logs, sequences, strict=True):
            item.context, sequence.context, sequence.handle = sequence, item, item.handle
            if sequence.finish_reason is not None:
                self._finish(sequence)

    def _keep_deadline(self, request: HopRequest) -> None:
        if request.spec.deadline_s is not None and not request.context.finished:
            self._deadlines.set(request.context, request.spec.deadline_s)

    def _check_ids(self, ids: Int32, param: str) -> None:
        vocab_size = self.core.config.vocab_size
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            check_token_ids(ids.tolist(), vocab_size, param)

    def _fail(self, request: HopRequest, accepted: Request, error: RequestError) -> None:
        self.child.fail(request, _error_info(error))
        for sequence in accepted.sequences:
            self.core.end(sequence, FinishReason.ERROR)

    def _refuse(self, request: HopRequest, error: RequestError) -> None:
        log.info("refused", request_id=request.rid, reason=error.message)
        self.core.metrics.refused()
        self.child.fail(request, _error_info(error))

    def _on_first_token(self, sequence: Sequence) -> None:
        self.child.report_cached(sequence.context.request, sequence.cached_tokens or 0)
        if sequence.prompt_records is not None:
            sequence.context.prompt = PromptInfo(sequence.prompt_records)

    def _finish(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self.child.finish(sequence.context, End(sequence.finish_reason, sequence.stop_reason))
        log.debug(
            "finished",
            request_id=sequence.request.rid,
            choice=sequence.choice,
            reason=sequence.finish_reason.name.lower(),
            tokens=sequence.num_generated,
        )

    # -- signs of life ---------------------------------------------------------------------------------------------

    def _on_hello(self, peer: str, hello: Hello) -> None:
        reply = self._make_hello(hello)
        refusal = reply.refusal or hello.refusal
        if refusal is not None:
            log.error("front end refused", peer=peer, reason=refusal)
        self._peers[peer] = self._clock()
        self.listener.send(peer, reply)
        if self._load is not None:
            self.listener.send(peer, self._load)

    def _send_load(self, now: float) -> None:
        """Tell everybody the load if it has changed, and once a beat anyway."""
        core = self.core
        load = Load(
            source=self._source,
            boot=self.listener.boot,
            running=sum(replica.num_running for replica in core.replicas),
            waiting=len(core.waiting),
            kv_usage=kv_usage(core.replicas),
            metrics=core.metrics.samples(core.replicas, len(core.waiting)),
            stalled_s=self._stall.stalled_s(),
        )
        if now < self._beat_due and self._load is not None and load.metrics == self._load.metrics:
            return
        self._load, self._beat_due = load, now + self._timers.beat_s
        for peer, heard in list(self._peers.items()):
            if now - heard > FORGET_BEATS * self._timers.beat_s:
                del self._peers[peer]
            else:
                self.listener.send(peer, load)


def _error_info(error: RequestError) -> ErrorInfo:
    return ErrorInfo(error.code, error.message, error.param)
