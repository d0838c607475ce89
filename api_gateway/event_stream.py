"""Writing server-sent events to one connection, from a callback and without a task switch."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from api_gateway.sse import HEADERS

STALL_LIMIT_S = 120.0
"""A reader that takes nothing for this long is cut off."""


class EventStream:
    """An open event stream.

    ``write`` never waits: it hands bytes to the transport. While ``blocked`` (the reader is slow and the transport's
    buffer is above its high-water mark) nothing more may be written; whoever writes merges what comes in the meantime
    and goes on after ``drained``. So a connection's buffer is bounded by the mark and one write.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._protocol = request.protocol
        self._transport = request.transport
        self._response = web.StreamResponse(headers=HEADERS)
        self._writer: AbstractStreamWriter | None = None
        self._chunked = False

    async def open(self) -> None:
        """Send the headers."""
        self._writer = await self._response.prepare(self._request)
        self._chunked = self._response.headers.get("Transfer-Encoding") == "chunked"

    @property
    def blocked(self) -> bool:
        return self._protocol.writing_paused

    def write(self, data: bytes) -> None:
        """Send whole events now. To a connection that is gone: nothing happens, its handler is being cancelled."""
        transport = self._transport
        # A chunk of no bytes would end a chunked body: a row may release no text.
        if not data or transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def drained(self) -> None:
        """Wait until the reader has caught up.

        Raises:
            ConnectionResetError: it did not within ``STALL_LIMIT_S``, or it is gone.
        """
        assert self._writer is not None
        try:
            async with asyncio.timeout(STALL_LIMIT_S):
                await self._writer.drain()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def close(self) -> web.StreamResponse:
        """End the response; the connection can serve the next request."""
        await self._response.write_eof()
        return self._response
