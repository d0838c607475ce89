"""Clients that send requests to gateways, read the answers and notice everything that is wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.chaos.workload import (
    CONNECTION_ERRORS,
    STREAMS,
    Answer,
    Report,
    Request,
    Wrong,
    check_answer,
    check_prefix,
    joined,
    whole,
)

RETRY_S = 0.05
NO_EVENT = "0"


class ConnectionLost(Exception):
    """The connection closed before the answer had ended.

    Args:
        asked: false if there was no connection in the first place.
        answered: whether the answer had begun.
    """

    def __init__(self, words: str, *, asked: bool = True, answered: bool = False) -> None:
        super().__init__(words)
        self.asked, self.answered = asked, answered


class HungUp(Exception):
    """The client closed the connection itself."""


@dataclass
class Reading:
    """How far a client has read an answer, over all connections that it was read from."""

    request: Request
    name: str
    """The request id of one that resumes: no two requests may have the same."""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """The ids of the chunks of a stream that resumes."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """Chunks of an earlier attempt that was begun again."""
    next_event: str = ""
    done: bool = False

    @property
    def headers(self) -> dict[str, str]:
        if not self.request.resumes:
            return {}
        return {"X-Request-Id": self.name, "Last-Event-ID": self.events[-1] if self.events else NO_EVENT}

    def begin_again(self) -> None:
        """Forget what came, but for the comparison with what comes now."""
        self.shown = max(self.shown, self.chunks, key=len)
        self.chunks = []

    def take(self, line: bytes) -> None:
        """Read one line of a stream."""
        if line.startswith(b"id: "):
            self.next_event = line[4:].decode().rstrip()
        if not line.startswith(b"data: "):
            return
        if self.done:
            raise Wrong(f"data after [DONE]: {line!r}")
        if line.rstrip() == b"data: [DONE]":
            self.done = True
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise Wrong(f"the stream ended with an error: {chunk['error']}")
        self.chunks.append(chunk)
        if self.request.resumes:
            if not self.next_event or self.next_event in self.events:
                raise Wrong(f"the id {self.next_event!r} of an event is missing or was there before")
            self.events.append(self.next_event)
            self.next_event = ""

    def answer(self) -> Answer:
        """The whole of a stream that has ended."""
        return joined(self.chunks)


class Clients:
    """Sends requests, each to its gateway, and collects the answers.

    Args:
        urls: of the gateways; two requests in turn go to the first, two to the second, …
        life: (gateway) → something that changes when the gateway is killed or dismissed, and is never the same until it
            is back. A connection may only close then: a gateway takes its connections with it. The request then goes
            on, or begins again, at the next one.
    """

    def __init__(self, urls: Sequence[str], life: Callable[[int], object]) -> None:
        self._urls, self._life = urls, life
        self._run = uuid.uuid4().hex[:12]
        self._count = itertools.count()
        self.readings: deque[Reading] = deque(maxlen=STREAMS)
        """The latest requests, for those who look when to strike."""
        self.report = Report()

    async def run(self, requests: Sequence[Request], seconds: float) -> Report:
        """All of them at once."""
        async with session() as opened:
            jobs = [asyncio.create_task(self._serve(opened, i, asked)) for i, asked in enumerate(requests)]
            _, pending = await asyncio.wait(jobs, timeout=seconds)
            for index, job in enumerate(jobs):
                if job in pending:
                    job.cancel()
                    self.report.wrong.append(f"request {index} has not ended after {seconds:g} s: {requests[index]}")
            await asyncio.gather(*jobs, return_exceptions=True)
        return self.report

    async def _serve(self, opened: aiohttp.ClientSession, index: int, request: Request) -> None:
        try:
            self.report.answers[index] = await self.ask(opened, request, index // 2)
        except Wrong as wrong:
            self.report.wrong.append(f"request {index}: {wrong}")
        except AssertionError as error:
            self.report.wrong.append(f"request {index}: {error!r}")

    def begin(self, request: Request) -> Reading:
        """A request of which nothing was read."""
        reading = Reading(request, f"chaos-{self._run}-{next(self._count)}")
        self.readings.append(reading)
        return reading

    async def ask(
        self, opened: aiohttp.ClientSession, request: Request, gateway: int, hang_up_after: int | None = None
    ) -> Answer:
        """The whole answer, however many connections it takes.

        Args:
            hang_up_after: so many chunks of a stream that resumes; the next gateway is asked for the rest.

        Raises:
            Wrong: the client saw what no client may see.
        """
        reading = self.begin(request)
        while True:
            gateway %= len(self._urls)
            life = self._life(gateway)
            try:
                answer = await read(opened, self._urls[gateway], reading, hang_up_after)
            except HungUp:
                hang_up_after = None
                gateway += 1
                continue
            except ConnectionLost as lost:
                await asyncio.sleep(RETRY_S)
                if self._life(gateway) == life and lost.asked:
                    raise Wrong(f"{lost}, but its gateway lives") from lost
                if lost.asked:
                    self.report.broken += lost.answered
                    self._count_lost(reading)
                gateway += 1
                continue
            if answer is None:
                self.report.refused += 1
                await asyncio.sleep(RETRY_S)
                continue
            check_answer(request, answer)
            check_prefix(reading.shown, answer)
            return answer

    def _count_lost(self, reading: Reading) -> None:
        if not reading.request.resumes:
            reading.begin_again()
            self.report.resent += 1
        elif reading.events:
            self.report.resumed += 1
        else:
            self.report.found_again += 1


def session() -> aiohttp.ClientSession:
    """A connection for each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=5))


async def read(
    opened: aiohttp.ClientSession, url: str, reading: Reading, hang_up_after: int | None = None
) -> Answer | None:
    """Read to the end; the whole answer. None: refused with 503, so that nothing was begun.

    Raises:
        ConnectionLost: it closed before the end.
        HungUp: a stream had ``hang_up_after`` chunks.
        Wrong: an error, a broken stream, or something after its end.
    """
    request, answered = reading.request, False
    try:
        async with opened.post(url + request.path, json=request.body, headers=reading.headers) as response:
            answered = True
            if response.status == 503:
                return None
            if response.status != 200:
                raise Wrong(f"status {response.status}: {await response.text()}")
            if not request.body["stream"]:
                return whole(json.loads(await response.read()))
            async for line in response.content:
                if line.endswith(b"\n"):
                    reading.take(line)
                if hang_up_after is not None and len(reading.chunks) >= hang_up_after and not reading.done:
                    raise HungUp
    except CONNECTION_ERRORS as error:
        if reading.done:
            return reading.answer()
        words = f"connection lost after {len(reading.chunks)} chunks: {error!r}"
        asked = not isinstance(error, aiohttp.ClientConnectorError)
        raise ConnectionLost(words, asked=asked, answered=answered) from error
    if not reading.done:
        raise ConnectionLost(f"connection closed after {len(reading.chunks)} chunks", answered=True)
    return reading.answer()
