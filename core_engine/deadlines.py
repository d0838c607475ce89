"""Which requests are out of time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from core_engine.request import Request

FEW = 64
"""Entries that are never worth a look for outdated ones."""


class Deadlines:
    """A heap by time. Its cost is one comparison for each ``expired``, and the logarithm of its size for each ``set``.

    Args:
        clock: the engine's, in seconds. It counts the time in which the process was stopped, as a client does.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._most = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, request: Request, seconds: float) -> None:
        """Give a request so much time from now, in place of what it had."""
        request.deadline = self._clock() + seconds
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapq.heapify(self._heap)
            self._most = max(FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (request.deadline, next(self._numbers), request))

    def expired(self) -> list[Request]:
        """Take out the requests that have not ended in time."""
        found: list[Request] = []
        while self._heap and self._heap[0][0] <= self._clock():
            entry = heapq.heappop(self._heap)
            if _counts(entry):
                found.append(entry[2])
        return found


def _counts(entry: tuple[float, int, Request]) -> bool:
    """Whether its request runs, and has not got another deadline since."""
    at, _, request = entry
    return at == request.deadline and not request.finished
