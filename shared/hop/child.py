"""The upper side of a tokenizer or an engine: keeps the logs of requests for as long as somebody renews them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from shared.errors import ErrorCode
from shared.hop.log import Log
from shared.hop.outbox import MakeDelta, Outbox, Send, text_delta, token_delta
from shared.hop.quarantine import Quarantine
from shared.hop.request import Request, Source, Upper, upper_of
from shared.hop.timers import Clock, Timers
from shared.messages import (
    FINISHED,
    Abort,
    Ack,
    AckEntry,
    AckRows,
    Attempt,
    End,
    ErrorInfo,
    FinishReason,
    Go,
    Gone,
    Message,
    Submit,
    TextSpec,
    TokenSpec,
    Turn,
)


class ChildEvents(Protocol):
    """What the owner of a child hears. None of these may call ``receive``, ``tick`` or ``flush`` of the child."""

    def begin(self, request: Request) -> None:
        """Produce rows for each log that has not ended, after the ids that it holds; ``accept`` it, or ``fail`` it."""

    def replaced(self, old: Log, new: Log) -> None:
        """A re-submission brought other rows than ``old`` holds: ``new`` is a new sequence. Results in flight belong
        to ``old``, which is dead. Called before ``resubmitted``, and before ``begin`` when rows were given at once."""

    def resubmitted(self, request: Request) -> None:
        """A request that has begun was submitted again and goes on. An engine ``accept``s it again."""

    def unwanted(self, log: Log) -> None:
        """Nobody needs more of this choice of a request that has begun; its END row was set."""

    def rested(self, request: Request, resting: bool) -> None:
        """The request became an orphan and should rest, or was renewed and should go on (also before ``begin``)."""

    def dropped(self, request: Request) -> None:
        """The request was removed: done and acknowledged, aborted, or its lease ended. Free what it holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChildRole:
    """What distinguishes the children of the two hops."""

    spec_type: type[TextSpec] | type[TokenSpec]
    """What may be submitted."""
    make_delta: MakeDelta
    """Builds the delta message."""
    keeps_resumable: bool
    """A finished resumable request is kept until its lease ends: its client may come back."""


TOKENIZER = ChildRole(TextSpec, text_delta, keeps_resumable=True)
ENGINE = ChildRole(TokenSpec, token_delta, keeps_resumable=False)


class Child:
    """Bookkeeping of the requests that parents have submitted here.

    The owner passes messages to ``receive``, produces rows with ``append``, ``finish`` and ``fail``, calls ``flush``
    whenever it has worked for a while (once a step) and ``tick`` several times a beat.

    Args:
        send: sends a message to a peer; False when it cannot go out now.
        clock: the process's running time (``RunningClock``).
        role: ``ENGINE`` or ``TOKENIZER``.
        recompute: whether rows that only the client has can be computed again, identically (a batch-invariant
            engine), or somebody below decides (a tokenizer). If not, such a request is lost and fails.
    """

    def __init__(
        self,
        *,
        send: Send,
        clock: Clock,
        timers: Timers,
        events: ChildEvents,
        role: ChildRole,
        recompute: bool,
    ) -> None:
        self.requests: dict[str, Request] = {}
        """By request id."""
        self._send = send
        self._clock = clock
        self._timers = timers
        self._events = events
        self._role = role
        self._recompute = recompute
        self._outboxes: dict[str, Outbox] = {}
        self._quarantine = Quarantine(self._start, self._send_turn, timers)

    # -- what the owner produces -------------------------------------------------------------------------------------

    def append(self, log: Log, token: int) -> None:
        """Add a token row."""
        self.extend(log, (token,))

    def extend(self, log: Log, tokens: Sequence[int], records: Sequence[bytes] = ()) -> None:
        """Add token rows, with their log-probability records if the request asked for them."""
        log.grow(tokens, records)
        self.mark(log)

    def mark(self, log: Log) -> None:
        """Say that a log may hold rows that were not sent; the methods that add rows do so themselves."""
        if not log.dirty and log.outbox is not None:
            log.dirty = True
            log.outbox.dirty.append(log)

    def finish(self, log: Log, end: End) -> None:
        """Add the END row. The prompt's length is filled in when it is known."""
        if log.end is None:
            log.cut(len(log.ids), end)
            self.mark(log)

    def fail(self, request: Request, error: ErrorInfo) -> None:
        """End every choice that has not ended, and with that the request, with an error."""
        for log in request.logs:
            self.finish(log, End(FinishReason.ERROR, error=error))

    def accept(self, request: Request, prompt_tokens: int) -> None:
        """Tell the parent that the engine took the request, and how long its prompt is in tokens."""
        request.prompt_tokens = prompt_tokens
        if not upper_of(request).accepted:
            upper_of(request).accepted = True
            self._owe_held(request)

    def report_cached(self, request: Request, cached_tokens: int) -> None:
        """Tell the parent how much of the prompt the prefix cache held."""
        if cached_tokens and cached_tokens != request.cached_tokens:
            request.cached_tokens = cached_tokens
            self._owe_held(request)

    def supersede(self, request: Request, live: Attempt) -> None:
        """A newer attempt lives below: tell the parent, and forget the request."""
        upper = upper_of(request)
        self._send(upper.owner.peer, Gone(request.rid, upper.attempt, upper.handle, live))
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Remove a request."""
        if self.requests.get(request.rid) is not request:
            return
        del self.requests[request.rid]
        self._quarantine.forget(request)
        self._detach(request)
        for log in request.logs:
            log.live = False
        self._events.dropped(request)

    def flush(self) -> None:
        """Send what is due to every parent: Held rows, and all unsent rows in one delta message each."""
        now = self._clock()
        for outbox in self._outboxes.values():
            due = (outbox.dirty or outbox.held) and outbox.blocked_until <= now
            if due and not outbox.flush(self._send, self._role.make_delta):
                outbox.blocked_until = now + self._timers.retry_s

    def tick(self) -> None:
        """Act on time that has passed: leases, orphans, the turns of suspects. Call it several times a beat."""
        now = self._clock()
        for request in list(self.requests.values()):
            upper = upper_of(request)
            quiet = now - upper.renewed
            if quiet > self._timers.lease_s:
                self.drop(request)
            elif quiet > self._timers.orphan_s and not upper.orphan:
                upper.orphan = True
                self._events.rested(request, True)
        for peer in [peer for peer, outbox in self._outboxes.items() if outbox.idle]:
            del self._outboxes[peer]
        self._quarantine.admit(self.requests.values(), now)

    # -- what parents send -------------------------------------------------------------------------------------------

    def receive(self, peer: str, boot: int, message: Message) -> bool:
        """Take a message of the hop from a parent; False: it is not one."""
        source = Source(peer, boot)
        match message:
            case Submit():
                self._on_submit(source, message)
            case Ack():
                for entry in message.entries:
                    self._on_ack(source, entry)
            case AckRows():
                self._on_ack_rows(source, message)
            case Abort():
                self._on_abort(message)
            case Go():
                self._on_go(message)
            case _:
                return False
        return True

    def _on_submit(self, source: Source, message: Submit) -> None:
        if not isinstance(message.spec, self._role.spec_type):
            return
        now = self._clock()
        request = self.requests.get(message.rid)
        if request is not None:
            upper = upper_of(request)
            if (message.attempt, source) == (upper.attempt, upper.owner):
                self._renew(request, now)
                self._owe_held(request)
                return
            if not message.attempt.newer(upper.attempt):
                self._send(source.peer, Gone(message.rid, message.attempt, message.handle, upper.attempt))
                return
            if not _same_work(request.spec, message.spec):
                self.drop(request)
                request = None
        if request is None:
            request = self.requests[message.rid] = Request(message.rid, message.spec)
        rested = request.upper is not None and request.upper.orphan
        replaced = self._attach(request, source, message, now)
        for old, new in replaced:
            self._events.replaced(old, new)
        self._fail_if_lost(request)
        for log in request.logs:
            self.mark(log)
        self._owe_held(request)
        if rested:
            self._events.rested(request, False)
        if upper_of(request).started:
            self._events.resubmitted(request)
        else:
            self._quarantine.enter(request)
            self._quarantine.start_waiting()

    def _attach(self, request: Request, source: Source, message: Submit, now: float) -> list[tuple[Log, Log]]:
        """Make ``source`` the owner. Returns (old log, new log) of the choices whose rows were replaced."""
        started = request.upper is not None and request.upper.started
        self._detach(request)
        upper = request.upper = Upper(source, message.attempt, message.handle, now)
        upper.started, upper.suspect = started, message.suspect
        request.spec, request.known = message.spec, message.known
        outbox = self._outboxes.setdefault(source.peer, Outbox(source.peer))
        outbox.handles[message.handle] = request
        replaced = []
        position = 0
        for choice, count in enumerate(message.counts.tolist()):
            ids, end = message.tokens[position : position + count].tolist(), message.ends[choice]
            position += count
            log = request.logs[choice]
            old, known = log, message.known[choice]
            if end is not None or ((ids or log.rows) and not (log.rows and log.has(known))):
                log = Log(request, choice, ids, end)
            elif log.lacks_records(known.count) and not log.failed:
                # The parent needs these rows with their records: they are computed again.
                log = Log(request, choice, log.ids[: known.count])
                log.prompt = old.prompt
            if log is not old:
                old.live = False
                request.logs[choice] = log
                replaced.append((old, log))
            log.outbox, log.handle = outbox, message.handle
            log.sent = log.acked = min(count + (end is not None), log.rows)
        upper.base = sum(log.acked for log in request.logs)
        return replaced

    def _detach(self, request: Request) -> None:
        """Take the request from the parent that has it."""
        if request.upper is not None:
            outbox = self._outboxes.get(request.upper.owner.peer)
            if outbox is not None:
                outbox.handles.pop(request.upper.handle, None)
        for log in request.logs:
            log.outbox, log.dirty = None, False

    def _fail_if_lost(self, request: Request) -> None:
        """Rows that only the client has can be continued only if they can be computed again, identically."""
        if self._recompute:
            return
        for log, known in zip(request.logs, request.known, strict=True):
            if log.end is None and len(log.ids) < known.count:
                going = [log for log in request.logs if log.end is None]
                self.fail(request, ErrorInfo(ErrorCode.LOST, "the output can no longer be continued; start it again"))
                if upper_of(request).started:
                    for each in going:
                        self._events.unwanted(each)
                return

    def _on_ack(self, source: Source, entry: AckEntry) -> None:
        request = self.requests.get(entry.rid)
        if request is None or (entry.attempt, source) != (upper_of(request).attempt, upper_of(request).owner):
            # An attempt newer than what is known: its Submit was lost, so it is unknown here.
            superseded = request is not None and not entry.attempt.newer(upper_of(request).attempt)
            live = upper_of(request).attempt if request is not None and superseded else None
            self._send(source.peer, Gone(entry.rid, entry.attempt, entry.handle, live))
            return
        self._renew(request, self._clock())
        for log, have in zip(request.logs, entry.have, strict=False):
            self._acknowledge(log, have)
            if entry.resync and log.sent > have:
                log.sent = have
                self.mark(log)
        if entry.beat:
            self._owe_held(request)
        self._after_acks(request)

    def _on_ack_rows(self, source: Source, message: AckRows) -> None:
        outbox = self._outboxes.get(source.peer)
        handles = outbox.handles if outbox is not None else {}
        for handle, choice, have in message.rows.tolist():
            request = handles.get(handle)
            if request is not None and choice < request.n:
                self._acknowledge(request.logs[choice], have)
                self._after_acks(request)

    def _acknowledge(self, log: Log, have: int) -> None:
        log.acked = max(log.acked, have)
        if have == FINISHED and log.end is None:
            log.end = End(FinishReason.STOP)
            log.sent = log.rows
            if upper_of(log.request).started:
                self._events.unwanted(log)

    def _after_acks(self, request: Request) -> None:
        self._quarantine.acknowledged(request)
        kept = self._role.keeps_resumable and request.spec.resumable
        if not kept and all(log.end is not None and log.acked >= log.rows for log in request.logs):
            self.drop(request)

    def _on_abort(self, message: Abort) -> None:
        request = self.requests.get(message.rid)
        if request is not None:
            attempt = upper_of(request).attempt
            if message.attempt == attempt or message.attempt.newer(attempt):
                self.drop(request)

    def _on_go(self, message: Go) -> None:
        request = self.requests.get(message.rid)
        if request is not None and message.attempt == upper_of(request).attempt:
            self._quarantine.go(request)

    def _renew(self, request: Request, now: float) -> None:
        upper = upper_of(request)
        upper.renewed = now
        if upper.orphan:
            upper.orphan = False
            self._events.rested(request, False)

    def _owe_held(self, request: Request) -> None:
        upper = upper_of(request)
        outbox = self._outboxes.get(upper.owner.peer)
        if outbox is not None:
            outbox.held[upper.handle] = request

    def _start(self, request: Request) -> None:
        if not request.over:
            self._events.begin(request)

    def _send_turn(self, request: Request) -> None:
        upper = upper_of(request)
        self._send(upper.owner.peer, Turn(request.rid, upper.attempt, upper.handle))


def _same_work(one: TextSpec | TokenSpec, other: TextSpec | TokenSpec) -> bool:
    """Whether two specs ask for the same; the remaining time always differs."""
    return dataclasses.replace(one, deadline_s=None) == dataclasses.replace(other, deadline_s=None)
