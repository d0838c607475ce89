"""aiohttp's server with our limits, and with error objects for requests that never reach a route."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from api_gateway.errors import json_error
from shared.errors import StartupError
from shared.logging import get_logger

MAX_LINE_BYTES = 8190
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 128
KEEPALIVE_S = 75.0
BACKLOG = 4096

log = get_logger()


class _JsonErrorHandler(RequestHandler):
    """One connection. What cannot be parsed as HTTP is answered with an error object, and the connection is closed."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; an error cannot be sent any more")
        if status >= 500:
            log.error("error outside of a route", exc_info=exc)
            message = "the server had an error while processing the request"
        else:
            log.debug("bad HTTP", status=status, error=str(exc))
        response = json_error(status, (message or "bad request").splitlines()[0].strip())
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _JsonErrorHandler(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs the application; a handler is cancelled when its client hangs up."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            shutdown_timeout=1.0,
        )

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        options: dict[str, Any] = dict(made._kwargs)
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **options,
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port``.

    Raises:
        StartupError: the address is in use, not ours or not an address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        words = error.strerror or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {words}; choose another --host or --port") from error
    return bound
