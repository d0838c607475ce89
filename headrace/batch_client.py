"""Asks a server for one result of a batch, again and again while it is overloaded or away."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import random
import time
from typing import NamedTuple

import aiohttp
import orjson

from headrace.batch_format import BatchRequest, Result, answered, failed
from headrace.client import RequestFailed

OVERLOADED = (429, 503)
"""The server is well and has no room yet."""
AWAY = (408, 502, 504)
"""What proxies say about a server that they do not reach."""
FIRST_DELAY_S = 0.5
LAST_DELAY_S = 30.0
LONGEST_RETRY_AFTER_S = 600.0
CONNECT_LIMIT_S = 30.0


class Failure(NamedTuple):
    """A try that may go better next time."""

    result: Result
    """What stands if there is no next time."""
    overloaded: bool = False
    unreachable: bool = False
    retry_after_s: float = 0.0


class BatchClient:
    """The requests of one batch to one server.

    A request is tried again at most ``max_retries`` times. Tries that met an overloaded server are forgotten whenever
    another request of the batch has been answered since: it is slow then, not stuck.

    Args:
        timeout_s: how long one try may take.
    """

    def __init__(self, url: str, api_key: str, max_retries: int, timeout_s: float) -> None:
        self.retries = 0
        """Tries that were repeated, of all requests."""
        self._url = url
        self._max_retries = max_retries
        self._answered = 0
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"} | authorization,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S),
        )

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, request: BatchRequest) -> Result:
        """Send a request until there is an answer that stands.

        Raises:
            RequestFailed: the server could not be reached at all, so that no other request would fare better.
        """
        tries, answered_before = 0, self._answered
        while True:
            outcome = await self._try(request)
            if isinstance(outcome, Result):
                self._answered += 1
                return outcome
            if outcome.overloaded and self._answered > answered_before:
                tries = 0
            tries, answered_before = tries + 1, self._answered
            if tries > self._max_retries:
                if outcome.unreachable and outcome.result.error is not None:
                    raise RequestFailed(outcome.result.error.message)
                return outcome.result
            self.retries += 1
            await asyncio.sleep(max(outcome.retry_after_s, delay_s(tries)))

    async def _try(self, request: BatchRequest) -> Result | Failure:
        custom_id = request.custom_id
        try:
            async with self._session.post(self._url + request.url, data=orjson.dumps(request.body)) as response:
                status, request_id = response.status, response.headers.get("X-Request-Id", "")
                result = answered(custom_id, status, request_id, _json_or_text(await response.read()))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Failure(failed(custom_id, "connection_error", f"{self._url}: {error}"), unreachable=True)
        except TimeoutError:
            return Failure(failed(custom_id, "timeout", f"{self._url} has not answered in time"))
        except (aiohttp.ClientError, OSError) as error:
            message = f"the connection to {self._url} was lost: {error or type(error).__name__}"
            return Failure(failed(custom_id, "connection_error", message))
        if status in OVERLOADED or status in AWAY:
            wait_s = retry_after_s(response.headers.get("Retry-After", ""))
            return Failure(result, overloaded=status in OVERLOADED, retry_after_s=wait_s)
        return result


def delay_s(tries: int) -> float:
    """Exponential back-off with jitter, after so many tries in a row, from 1."""
    longest = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(tries - 1, 16))
    return longest * random.uniform(0.5, 1.0)


def retry_after_s(header: str) -> float:
    """The wait that a ``Retry-After`` header asks for: seconds, or a date (RFC 9110, section 10.2.3); else 0."""
    seconds = 0.0
    with contextlib.suppress(ValueError):
        seconds = float(header)
    with contextlib.suppress(ValueError, TypeError):
        seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER_S)


def _json_or_text(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except ValueError:
        return body.decode(errors="replace")
