"""How much work the gateway lets in. The engine's own queue bound is the authoritative one; this one guards memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from api_gateway.departures import Departures
from shared.errors import ErrorCode, RequestError


class Admission:
    """Counts the requests that are being served, and knows when the last one has left.

    Args:
        limit: requests served at the same time; more are refused with 429.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle = asyncio.Event()
        self._idle.set()
        self.active = 0
        self.rejected = 0
        self.draining = False
        self.departures = Departures()

    @property
    def full(self) -> bool:
        return self.active >= self._limit

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place while the request is served.

        Raises:
            RequestError: 503 while the gateway is going down, 429 when it is full.
        """
        if self.draining:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE)
        if self.full:
            self.rejected += 1
            raise RequestError(
                f"{self.active} requests are being served, which is the limit (--max-connections, open files)",
                code=ErrorCode.OVERLOADED,
            )
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            self.departures.count()
            if not self.active:
                self._idle.set()

    async def drained(self, limit_s: float) -> bool:
        """Wait until nothing is served any more; False: the time ran out first."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
