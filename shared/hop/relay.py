"""A tokenizer: the child of gateways and the parent of engines, for the same requests and on the same logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shared.hop.child import TOKENIZER, Child
from shared.hop.intake import Growth
from shared.hop.log import Log
from shared.hop.outbox import Send
from shared.hop.parent import Parent
from shared.hop.request import Request, upper_of
from shared.hop.timers import Clock, Timers
from shared.messages import Attempt, End, ErrorInfo, Message, TokenSpec


class RelayEvents(Protocol):
    """What a tokenizer hears. Inside these calls it may use ``start``, ``fail`` and ``Log.cut``."""

    def begin(self, request: Request) -> None:
        """Make the prompt's ids, now or later, and ``start`` the request, or ``fail`` it."""

    def grew(self, growths: Sequence[Growth]) -> None:
        """Logs got token rows or END from an engine. Make the text: one entry of ``log.pieces`` for each new id, and
        ``log.last_piece`` when it has ended. A stop string is found here: ``log.cut``."""

    def replaced(self, log: Log) -> None:
        """A log that was given with a submission: make the text of all its ids, as for ``grew``."""

    def dropped(self, request: Request) -> None:
        """The request was removed."""


class Relay:
    """The two sides of a tokenizer, and what one means for the other.

    ``receive_from_gateway`` and ``receive_from_engine`` take messages; ``flush`` whenever some work was done, ``tick``
    several times a beat. ``child`` and ``parent`` are there to be looked at; ``parent.set_children`` and
    ``parent.set_usable`` tell about engines.
    """

    def __init__(
        self,
        *,
        send_up: Send,
        send_down: Send,
        clock: Clock,
        timers: Timers,
        events: RelayEvents,
        engines: Iterable[str] = (),
    ) -> None:
        self._events = events
        self.child = Child(send=send_up, clock=clock, timers=timers, events=self, role=TOKENIZER, recompute=True)
        self.parent = Parent(send=send_down, clock=clock, timers=timers, events=self, children=engines)

    # -- for the owner -----------------------------------------------------------------------------------------------

    def receive_from_gateway(self, peer: str, boot: int, message: Message) -> bool:
        """False: not a message of the hop."""
        return self.child.receive(peer, boot, message)

    def receive_from_engine(self, name: str, boot: int, message: Message) -> bool:
        """Pass every message of an engine; False: the hop has no use for it."""
        return self.parent.receive(name, boot, message)

    def start(self, request: Request, spec: TokenSpec) -> None:
        """Give a request that has begun to an engine. Nothing happens if it was dropped or has failed meanwhile."""
        if self.child.requests.get(request.rid) is request and not request.over:
            self.parent.place(request, spec, upper_of(request).attempt)

    def fail(self, request: Request, error: ErrorInfo) -> None:
        """End a request with an error."""
        self.child.fail(request, error)
        self.parent.close(request)

    def finish(self, log: Log, end: End) -> None:
        """End one choice."""
        self.child.finish(log, end)
        self.parent.finished(log)

    def tick(self) -> None:
        self.child.tick()
        self.parent.tick()

    def flush(self) -> None:
        self.parent.flush()
        self.child.flush()

    # -- what the child hears ----------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        self._events.begin(request)

    def replaced(self, old: Log, new: Log) -> None:
        self._events.replaced(new)

    def resubmitted(self, request: Request) -> None:
        if request.over:
            self.parent.close(request)
            self.child.accept(request, request.prompt_tokens)
        elif request.lower is not None:
            attempt, below = upper_of(request).attempt, request.lower.attempt
            raised = below._replace(t=below.t + 1)
            self.parent.place(request, request.lower.spec, raised if below[:2] == attempt[:2] else attempt)

    def unwanted(self, log: Log) -> None:
        self.parent.finished(log)

    def rested(self, request: Request, resting: bool) -> None:
        """Nothing to do: the parent does not renew orphans below."""

    def dropped(self, request: Request) -> None:
        self.parent.close(request)
        self._events.dropped(request)

    # -- what the parent hears ---------------------------------------------------------------------------------------

    def accepted(self, request: Request) -> None:
        self.child.accept(request, request.prompt_tokens)

    def grew(self, growths: Sequence[Growth]) -> None:
        self._events.grew(growths)
        for log, _ in growths:
            self.child.mark(log)

    def superseded(self, request: Request, live: Attempt) -> None:
        self.child.supersede(request, live)
