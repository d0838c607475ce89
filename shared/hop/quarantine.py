"""Suspects run alone.

A request that was aboard crashes of this kind of process may be their cause. It starts only when nothing else runs
here and its parent has said Go, and nothing else starts until three more of its rows are *acknowledged*: rows that were
only produced may never have left the process, and the next crash would be blamed on whoever started then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shared.hop.request import Request, upper_of
from shared.hop.timers import Timers

CLEAR_ROWS = 3
"""Rows after which a suspect is no longer one."""


class Quarantine:
    """Which of the waiting requests of a child may start."""

    def __init__(self, start: Callable[[Request], None], send_turn: Callable[[Request], None], timers: Timers) -> None:
        self._start = start
        self._send_turn = send_turn
        self._timers = timers
        self._waiting: dict[Request, None] = {}
        self._turn: Request | None = None
        """The suspect that runs alone now."""
        self._asked: Request | None = None
        """The suspect whose parent was sent Turn."""
        self._asked_at = -1e9

    def enter(self, request: Request) -> None:
        """A request waits for its start."""
        self._waiting[request] = None

    def forget(self, request: Request) -> None:
        self._waiting.pop(request, None)
        if self._turn is request:
            self._turn = None
        if self._asked is request:
            self._asked = None

    def start_waiting(self) -> None:
        """Start everything that waits, unless a suspect runs or waits for its turn."""
        if self._turn is None and not any(_is_live_suspect(request) for request in self._waiting):
            for request in [request for request in self._waiting if not upper_of(request).suspect]:
                self._begin(request)

    def admit(self, requests: Collection[Request], now: float) -> None:
        """Let the next start: the first suspect once nothing else runs, everything else while there is none."""
        if self._turn is not None and self._cleared(self._turn):
            self._turn = None
        for request in [request for request in self._waiting if request.over]:
            del self._waiting[request]
        suspects = [request for request in self._waiting if _is_live_suspect(request)]
        if self._turn is not None or not suspects:
            self.start_waiting()
            return
        if sum(not request.over for request in requests) > len(self._waiting):
            return
        if self._asked not in suspects:
            self._asked, self._asked_at = suspects[0], -1e9
        if self._asked is not None and now - self._asked_at >= self._timers.turn_s:
            self._asked_at = now
            self._send_turn(self._asked)

    def go(self, request: Request) -> None:
        """The parent of a suspect said Go."""
        if request is self._asked and not upper_of(request).started:
            self._asked, self._turn = None, request
            self._begin(request)

    def acknowledged(self, request: Request) -> None:
        """Rows of a request were acknowledged: its turn may be over."""
        if request is self._turn and self._cleared(request):
            self._turn = None
            self.start_waiting()

    def _begin(self, request: Request) -> None:
        self._waiting.pop(request, None)
        upper_of(request).started = True
        self._start(request)

    @staticmethod
    def _cleared(request: Request) -> bool:
        upper = upper_of(request)
        acked = sum(min(log.acked, log.rows) for log in request.logs)
        return acked >= upper.base + CLEAR_ROWS or (request.over and acked >= request.size) or upper.orphan


def _is_live_suspect(request: Request) -> bool:
    return upper_of(request).suspect and not upper_of(request).orphan and not request.over
