"""The lower side of a gateway or a tokenizer: keeps each request placed on one child, and its logs growing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from shared.errors import ErrorCode
from shared.hop.children import ChildLink, ChildSet
from shared.hop.crashes import strike, was_aboard
from shared.hop.intake import Growth, take_delta
from shared.hop.log import Log
from shared.hop.outbox import Send
from shared.hop.placing import ack_entry, submit_of
from shared.hop.request import NOTHING_KNOWN, Lower, Request, Source, lower_of
from shared.hop.timers import Clock, Timers
from shared.messages import (
    FINISHED,
    Abort,
    Ack,
    AckRows,
    Attempt,
    End,
    ErrorInfo,
    FinishReason,
    Go,
    Gone,
    Held,
    Known,
    Message,
    TextDelta,
    TextSpec,
    TokenDelta,
    TokenSpec,
    Turn,
)

MAX_ENTRIES = 1024
"""Requests in one Ack message."""
LAST_HANDLE = 2**31 - 2


class ParentEvents(Protocol):
    """What the owner of a parent hears."""

    def accepted(self, request: Request) -> None:
        """The engine took the request; ``prompt_tokens`` is known. Called again after each re-submission."""

    def grew(self, growths: Sequence[Growth]) -> None:
        """Logs got rows. All of one delta message come in one call. A tokenizer makes the text here, and may ``cut``
        a log; a request that is over after this call is acknowledged, or aborted if it failed, and forgotten."""

    def superseded(self, request: Request, live: Attempt) -> None:
        """A newer attempt of the request lives elsewhere; it was forgotten here. A gateway closes the stream without
        a terminal event; a tokenizer tells its parent."""


class Parent:
    """Bookkeeping of the requests that this process has given to children.

    The owner passes messages to ``receive`` (all of them: any message may show that a child was restarted), calls
    ``flush`` whenever it has worked for a while and ``tick`` several times a beat.

    Args:
        send: sends a message to a child, by its name; False when it cannot go out now.
        clock: the process's running time (``RunningClock``).
        children: names of the children; ``set_children`` changes them.
        uid: draws the unique part of an attempt, 63 bits.
    """

    def __init__(
        self,
        *,
        send: Send,
        clock: Clock,
        timers: Timers,
        events: ParentEvents,
        children: Iterable[str] = (),
        uid: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.requests: dict[str, Request] = {}
        """Those that are not over, by request id."""
        self.children = ChildSet(children)
        self._send = send
        self._clock = clock
        self._timers = timers
        self._events = events
        self._uid = uid
        self._unplaced: dict[Request, None] = {}
        """Requests whose Submit no child took yet."""
        self._last_handle = 0
        self._beat_at = clock()

    # -- what the owner asks for -------------------------------------------------------------------------------------

    def open(
        self, rid: str, spec: TextSpec, known: Sequence[Known] = (), ended: Iterable[int] = (), context: object = None
    ) -> Request:
        """A gateway's new request, or one that is resumed here; it replaces an earlier one of the same id.

        Args:
            known: of a resumed request: what the client has of each choice.
            ended: choices whose END the client has; they are not asked for again.
            context: becomes ``request.context``.

        Returns:
            The request. If it is ``over`` at once the client lacked only the terminal event.
        """
        old = self.requests.get(rid)
        if old is not None:
            self._forget(old)
        request = Request(rid, spec)
        request.context = context
        request.known = list(known) or request.known
        for choice in ended:
            request.logs[choice].end = End(FinishReason.STOP)
            request.known = [*request.known[:choice], NOTHING_KNOWN, *request.known[choice + 1 :]]
        if not request.over:
            self.place(request, spec, Attempt(1, self._uid(), 0))
        return request

    def find(self, rid: str, known: Sequence[Known]) -> Request | None:
        """The live request of this id if its logs have all that a resuming client knows."""
        request = self.requests.get(rid)
        if request is None or len(known) != request.n:
            return None
        return request if all(log.has(each) for log, each in zip(request.logs, known, strict=True)) else None

    def place(self, request: Request, spec: TextSpec | TokenSpec, attempt: Attempt) -> None:
        """Give a request to a child for the first time, or again under an attempt that came from above."""
        if request.lower is None:
            request.lower = Lower(spec)
        request.lower.spec = spec
        self.requests[request.rid] = request
        self._place(request, attempt)

    def close(self, request: Request, *, keep: bool = False) -> None:
        """Nobody wants the request any more. ``keep``: its client may come back, so the child keeps its log until the
        lease ends; else it is aborted."""
        if self.requests.get(request.rid) is request:
            if not keep:
                self._abort(request)
            self._forget(request)

    def finished(self, log: Log) -> None:
        """The owner ended a log by itself: the child need not go on with it."""
        request = log.request
        if self.requests.get(request.rid) is request:
            self._acknowledge_ends([(log, log.rows)])

    def set_children(self, names: Iterable[str]) -> None:
        """Set who there is. Requests of a child that is gone move to another."""
        for gone in self.children.replace(names):
            for request in list(gone.handles.values()):
                lower_of(request).child = None
                self._place(request, self._raised(request))

    def set_usable(self, name: str, usable: bool) -> None:
        """Say whether a child is ready for requests; others are preferred while it is not."""
        child = self.children.get(name)
        if child is not None:
            child.usable = usable

    def reached(self, name: str) -> None:
        """A child is connected, perhaps again: what waits for it goes out with the next ``flush``."""
        child = self.children.get(name)
        if child is not None:
            child.blocked_until = 0.0

    def lost(self, name: str) -> None:
        """The connection to a child is gone, for longer than a blip: its requests move to another, if there is one. It
        is not usable until ``set_usable`` says so."""
        child = self.children.get(name)
        if child is not None:
            child.usable = False
            if len(self.children) > 1:
                for request in [request for request in child.handles.values() if _is_renewed(request)]:
                    self._place(request, self._raised(request), move=True)

    def flush(self) -> None:
        """Send what is due: acknowledgements that do not wait, demands after a gap, Submits that nobody took."""
        now = self._clock()
        for request in list(self._unplaced):
            self._submit(request, self._order(request))
        for child in self.children:
            if child.owed and child.blocked_until <= now and not self._flush_child(child):
                child.blocked_until = now + self._timers.retry_s

    def tick(self) -> None:
        """Act on time that has passed: the beat, and children that are silent. Call it several times a beat."""
        now = self._clock()
        if len(self.children) > 1:
            for request in list(self.requests.values()):
                lower = lower_of(request)
                silent = now - lower.heard_at > self._timers.silence_s
                if silent and lower.child is not None and request not in self._unplaced and _is_renewed(request):
                    self._place(request, self._raised(request), move=True)
        if now - self._beat_at >= self._timers.beat_s:
            self._beat_at = now
            self._beat()

    # -- placing -----------------------------------------------------------------------------------------------------

    def _place(self, request: Request, attempt: Attempt, *, move: bool = False) -> None:
        """Submit under ``attempt``, to the child that has it if it has one; ``move``: to another if there is one."""
        lower = lower_of(request)
        order = self._order(request, last=lower.child if move else None)
        self._unlink(request)
        lower.attempt = attempt
        lower.handle = self._new_handle()
        lower.go, lower.confirmed = None, False
        lower.heard, lower.heard_at = True, self._clock()
        lower.base = request.size
        self._submit(request, order)

    def _order(self, request: Request, last: ChildLink | None = None) -> list[ChildLink]:
        current = lower_of(request).child
        order = list(self.children.order(request.rid))
        if last in order:
            order.sort(key=lambda child: child is last)
        elif current in order:
            order.sort(key=lambda child: child is not current)
        return order

    def _submit(self, request: Request, order: Sequence[ChildLink]) -> None:
        """Send the Submit to the first child that takes it; none: ``flush`` tries again. An attempt that never went
        out may go to any of them."""
        lower, now = lower_of(request), self._clock()
        for child in order:
            if child.blocked_until > now:
                continue
            if self._send(child.name, submit_of(request)):
                self._unplaced.pop(request, None)
                lower.child = child
                lower.touched[child.name] = child.boot
                child.handles[lower.handle] = request
                return
            child.blocked_until = now + self._timers.retry_s
        self._unplaced[request] = None

    def _new_handle(self) -> int:
        # A handle comes back after two thousand million Submits; no request lives that long.
        self._last_handle = self._last_handle % LAST_HANDLE + 1
        return self._last_handle

    def _unlink(self, request: Request) -> None:
        lower = lower_of(request)
        self._unplaced.pop(request, None)
        if lower.child is not None:
            lower.child.handles.pop(lower.handle, None)
            lower.child.demands.pop(request, None)

    def _forget(self, request: Request) -> None:
        self._unlink(request)
        if self.requests.get(request.rid) is request:
            del self.requests[request.rid]

    def _abort(self, request: Request) -> None:
        lower = lower_of(request)
        if lower.child is not None and request not in self._unplaced:
            lower.child.aborts.append(Abort(request.rid, lower.attempt))
            self._send_aborts(lower.child)

    @staticmethod
    def _raised(request: Request) -> Attempt:
        """The next attempt: a tokenizer, which has a parent itself, raises its own part."""
        attempt = lower_of(request).attempt
        if request.upper is not None:
            return attempt._replace(t=attempt.t + 1)
        return Attempt(attempt.g + 1, attempt.uid, 0)

    # -- what children send ------------------------------------------------------------------------------------------

    def receive(self, name: str, boot: int, message: Message) -> bool:
        """Take any message from a child; False: the hop has no use for it."""
        child = self.children.get(name)
        if child is None:
            return isinstance(message, TokenDelta | TextDelta | Held | Gone | Turn)
        if boot in child.earlier:
            return True  # still on its way from a life that has ended
        if child.boot != boot:
            self._on_new_boot(child, boot)
        match message:
            case TokenDelta() | TextDelta():
                self._on_delta(child, message)
            case Held():
                self._on_held(child, message)
            case Gone():
                self._on_gone(child, message)
            case Turn():
                self._on_turn(child, message)
            case _:
                return False
        return True

    def _on_new_boot(self, child: ChildLink, boot: int) -> None:
        """A child was restarted: what it had is gone, and those aboard may have been the cause."""
        before, child.boot = child.boot, boot
        if before is None:
            return
        child.earlier.append(before)
        child.aborts.clear()
        crashed = Source(child.name, before)
        for request in list(self.requests.values()):
            lower = lower_of(request)
            if self.requests.get(request.rid) is not request:
                continue  # closed by its owner, who just heard of another's conviction
            if was_aboard(lower, crashed) and strike(lower, crashed):
                self._convict(request)
            elif child.handles.get(lower.handle) is request:
                self._place(request, self._raised(request))

    def _convict(self, request: Request) -> None:
        growths = []
        error = ErrorInfo(ErrorCode.POISON, "the request was stopped: it ended the processes that worked on it")
        for log in request.logs:
            if log.end is None:
                growths.append((log, log.rows))
                log.end = End(FinishReason.ERROR, error=error, prompt_tokens=request.prompt_tokens)
        self._events.grew(growths)
        self._acknowledge_ends(growths)

    def _on_delta(self, child: ChildLink, message: TokenDelta | TextDelta) -> None:
        now = self._clock()
        growths, gaps = take_delta(child, message, now)
        for request in gaps:
            self._demand(child, request, now)
        if growths:
            self._events.grew(growths)
            self._acknowledge_ends(growths)

    def _demand(self, child: ChildLink, request: Request, now: float) -> None:
        """A delta began beyond the log: ask for what is missing, but not again for each delta on its way."""
        lower = lower_of(request)
        if now - lower.resync_at >= self._timers.resync_s:
            lower.resync_at = now
            child.demands[request] = None

    def _acknowledge_ends(self, growths: Iterable[Growth]) -> None:
        """Acknowledge logs that have ended, and forget requests that are over."""
        ended = [log for log, _ in growths if log.end is not None]
        for log in ended:
            request = log.request
            if self.requests.get(request.rid) is not request:
                continue
            lower = lower_of(request)
            if request.failed:
                self._abort(request)
                self._forget(request)
            elif lower.child is not None:
                lower.child.acks.extend((lower.handle, log.choice, FINISHED))
        # Only now: several choices of a request may end in one delta, and each is acknowledged.
        for log in ended:
            if log.request.over:
                self._forget(log.request)

    def _on_held(self, child: ChildLink, message: Held) -> None:
        now = self._clock()
        for handle, accepted, prompt_tokens, cached_tokens in message.rows.tolist():
            request = child.handles.get(handle)
            if request is None:
                continue
            lower = lower_of(request)
            lower.heard_at = now
            lower.touched[child.name] = child.boot
            request.cached_tokens = cached_tokens or request.cached_tokens
            if accepted and not lower.confirmed:
                lower.accepted = lower.confirmed = True
                request.prompt_tokens = prompt_tokens
                self._events.accepted(request)

    def _mine(self, child: ChildLink, handle: int, attempt: Attempt) -> Request | None:
        """The request that a message is about, if it is about its live attempt at this child."""
        request = child.handles.get(handle)
        if request is None or lower_of(request).attempt != attempt:
            return None
        lower_of(request).heard_at = self._clock()
        return request

    def _on_gone(self, child: ChildLink, message: Gone) -> None:
        request = self._mine(child, message.handle, message.attempt)
        if request is None:
            return
        if message.live is None:
            self._place(request, self._raised(request))
        elif request.upper is None and not lower_of(request).accepted:
            self._place(request, Attempt(message.live.g + 1, lower_of(request).attempt.uid, 0))
        else:
            self._forget(request)
            self._events.superseded(request, message.live)

    def _on_turn(self, child: ChildLink, message: Turn) -> None:
        request = self._mine(child, message.handle, message.attempt)
        if request is not None and child.boot is not None:
            lower_of(request).go = Source(child.name, child.boot)
            self._send(child.name, Go(request.rid, message.attempt))

    # -- acknowledging -----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Acknowledge everything; a request that has heard nothing since the last beat asks for a resend."""
        for child in self.children:
            entries = []
            for request in child.handles.values():
                if _is_renewed(request):
                    lower = lower_of(request)
                    entries.append(ack_entry(request, resync=not lower.heard, beat=True))
                    lower.heard = False
            for first in range(0, len(entries), MAX_ENTRIES):
                self._send(child.name, Ack(entries[first : first + MAX_ENTRIES]))

    def _send_aborts(self, child: ChildLink) -> bool:
        """Without them a child would work on until the lease of what nobody wants ends."""
        sent = 0
        for abort in child.aborts:
            if not self._send(child.name, abort):
                break
            sent += 1
        del child.aborts[:sent]
        return not child.aborts

    def _flush_child(self, child: ChildLink) -> bool:
        if not self._send_aborts(child):
            return False
        if child.acks:
            if not self._send(child.name, AckRows(np.array(child.acks, np.int32).reshape(-1, 3))):
                return False
            del child.acks[:]
        if child.demands:
            if not self._send(child.name, Ack([ack_entry(request, resync=True) for request in child.demands])):
                return False
            child.demands.clear()
        return True


def _is_renewed(request: Request) -> bool:
    """A tokenizer does not renew an orphan below: so the engine lets it rest, too."""
    return request.upper is None or not request.upper.orphan
