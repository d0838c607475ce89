"""Reading a request's body within limits."""

from __future__ import annotations

import asyncio

from aiohttp import web

from shared.errors import ErrorCode, RequestError

BODY_LIMIT_S = 60.0
"""Time for a body to arrive."""


async def read_json_body(request: web.Request) -> bytes:
    """The body of a JSON request, at most ``client_max_size`` bytes of it.

    Raises:
        RequestError: 415 for another type or a compressed body, 413 as soon as it is known to be too large, 408 when
            it does not arrive.
        web.HTTPRequestEntityTooLarge: more bytes came than were announced or allowed.
    """
    if request.content_type != "application/json":
        given = request.headers.get("Content-Type", "nothing")[:60]
        raise RequestError(
            f"Content-Type must be application/json, got {given}", "Content-Type", ErrorCode.UNSUPPORTED_MEDIA_TYPE
        )
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError("compressed bodies are not accepted", "Content-Encoding", ErrorCode.UNSUPPORTED_MEDIA_TYPE)
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise RequestError(f"the request body is larger than {limit} bytes", code=ErrorCode.TOO_LARGE)
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the request body did not arrive in {BODY_LIMIT_S:g} s", code=ErrorCode.TIMEOUT) from None
