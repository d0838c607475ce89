"""The time that a client gives a request: when it is over the request ends, whatever it is waiting for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

from aiohttp import web

from api_gateway.errors import out_of_time
from api_gateway.fields import seconds
from api_gateway.generation import Generation
from api_gateway.schemas import GenerationRequest
from shared.errors import ErrorCode, RequestError

HEADER = "X-Request-Timeout"


def with_deadline(asked: GenerationRequest, request: web.Request) -> GenerationRequest:
    """``asked`` with the shorter of its own ``timeout`` and the header's, which a proxy may have set.

    Raises:
        RequestError: the header is no number of seconds.
    """
    given = request.headers.get(HEADER)
    if given is not None:
        try:
            limit_s = seconds(HEADER, float(given))
        except ValueError:
            raise RequestError(f"{HEADER} must be a number of seconds", HEADER) from None
        asked = dataclasses.replace(asked, timeout_s=min(limit_s, asked.timeout_s or math.inf))
    if asked.timeout_s is None:
        return asked
    specs = [dataclasses.replace(spec, deadline_s=asked.timeout_s) for spec in asked.specs]
    return dataclasses.replace(asked, specs=specs)


@contextlib.contextmanager
def deadline(generation: Generation, abort: Callable[[Generation], None]) -> Iterator[None]:
    """End ``generation`` with an error when its time is over; ``abort`` frees what is computed for it."""
    limit_s = generation.request.timeout_s
    if limit_s is None:
        yield
        return

    aborted = False

    def expire() -> None:
        nonlocal aborted
        if not generation.finished.is_set():
            aborted = True
            generation.fail(out_of_time(limit_s))
            abort(generation)
            generation.flush()

    timer = asyncio.get_running_loop().call_later(limit_s, expire)
    try:
        yield
    finally:
        timer.cancel()
        failure = generation.failure
        if failure is not None and failure.code == ErrorCode.TIMEOUT and not aborted:
            # The engine counts the time, too, and was first.
            abort(generation)
