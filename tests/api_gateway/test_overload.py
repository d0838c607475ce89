"""More than can be served: refusals that say when to come back, and requests that run out of time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fake_tokenizer import until
from test_streams import connect, events, request_bytes

from api_gateway.departures import Departures
from shared.errors import ErrorCode
from shared.messages import ErrorInfo, Load


class Time:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_follows_the_rate() -> None:
    time = Time()
    departures = Departures(time)
    assert departures.rate == 0
    assert departures.wait_s(1000) == 1
    for _ in range(400):
        time.now += 0.25
        departures.count()
    assert departures.rate == pytest.approx(4, rel=0.02)
    assert [departures.wait_s(ahead) for ahead in (0, 1, 10, 38, 10_000)] == [1, 1, 3, 10, 60]
    time.now += 30
    assert departures.rate == pytest.approx(4 / 2.718, rel=0.05)


def test_the_first_departures_give_a_rate_at_once() -> None:
    time = Time()
    departures = Departures(time)
    for _ in range(4):
        time.now += 0.5
        departures.count()
    assert departures.rate == pytest.approx(2, rel=0.1)


async def test_a_refusal_says_when_to_come_back(serve: Any) -> None:
    served = await serve(max_connections=2)
    served.gateway.admission.departures = departures = Departures(Time())
    for _ in range(30):
        departures._clock.now += 4.0
        departures.count()
    held = [asyncio.create_task(served.post("/v1/completions", {"prompt": "hold"})) for _ in range(2)]
    await until(lambda: len(served.tokenizer.requests) == 2)
    status, _, headers = await served.post("/v1/completions", {"prompt": "x"})
    assert (status, headers["Connection"]) == (429, "close")
    assert int(headers["Retry-After"]) == 4
    load = Load("engine/e1", 5, 1, 200, 0.25, [])
    served.tokenizer.report(load)
    await until(lambda: any(known.waiting == 200 for known, _ in served.gateway.links.loads()))
    _, _, headers = await served.post("/v1/completions", {"prompt": "x"})
    assert int(headers["Retry-After"]) == 8
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await until(lambda: not served.gateway.admission.active)
    status, error, headers = await served.post("/v1/completions", {"prompt": "full"})
    assert (status, error["error"]["type"]) == (429, "rate_limit_error")
    assert "Retry-After" in headers
    assert headers.get("Connection") != "close"


@pytest.mark.parametrize("prompt", ["silent", "hold", "endless"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_when_its_time_is_over(served: Any, prompt: str, stream: bool) -> None:
    body = {"prompt": [prompt, "endless"], "n": 2, "max_tokens": 500, "timeout": 0.3, "stream": stream}
    async with served.http.post(served.url + "/v1/completions", json=body) as answer:
        status, data = answer.status, await answer.read()
    if status == 200:
        assert stream
        assert prompt != "silent"
        last = events(data)[-1]
    else:
        # Or its time was over before the engine had answered.
        last = json.loads(data)
    assert (last["error"]["code"], last["error"]["type"]) == (408, "timeout_error")
    assert "timeout of 0.3 s" in last["error"]["message"]
    await until(lambda: len(served.tokenizer.ended) == 2)
    assert served.tokenizer.running == 0
    assert not served.gateway.links.parent.requests
    assert served.tokenizer.requests[0].spec.deadline_s == 0.3
    assert await served.metric("headrace:gateway_timeouts_total") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_may_be_the_first_to_end_it(served: Any, stream: bool) -> None:
    body = {"prompt": ["endless", "endless"], "max_tokens": 500, "timeout": 30, "stream": stream}
    asked = asyncio.create_task(served.http.post(served.url + "/v1/completions", json=body))
    await until(lambda: len(served.tokenizer.requests) == 2)
    served.tokenizer.child.fail(served.tokenizer.requests[1], ErrorInfo(ErrorCode.TIMEOUT, "the time is over"))
    async with await asked as answer:
        data = await answer.read()
    error = (events(data)[-1] if answer.status == 200 else json.loads(data))["error"]
    assert (error["code"], error["message"]) == (408, "the request was not done within its timeout of 30 s")
    await until(lambda: len(served.tokenizer.ended) == 2)
    assert not served.gateway.links.parent.requests
    assert await served.metric("headrace:gateway_timeouts_total") == 1


async def test_the_shorter_of_body_and_header_counts(served: Any) -> None:
    for given, header, used in ((None, "5", 5), (3, "5", 3), (5, "2.5", 2.5), (7, None, 7), (None, None, None)):
        body = {"prompt": "x", "max_tokens": 1, "timeout": given}
        headers = {} if header is None else {"X-Request-Timeout": header}
        assert (await served.post("/v1/completions", body, headers=headers))[0] == 200
        assert served.tokenizer.requests[-1].spec.deadline_s == used
    for value in (0, -1, "5", True, [1]):
        status, error, _ = await served.post("/v1/completions", {"prompt": "x", "timeout": value})
        assert (status, error["error"]["param"]) == (400, "timeout")
    for value in ("0", "-1", "nan", "inf", "soon", ""):
        status, error, _ = await served.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout": value})
        assert (status, error["error"]["param"]) == (400, "X-Request-Timeout")
    assert await served.metric("headrace:gateway_timeouts_total") == 0


async def test_a_slow_reader_does_not_outlive_its_timeout_at_the_engine(served: Any) -> None:
    _, writer = await connect(served, limit=1024)
    body = {"prompt": "huge", "n": 100, "max_tokens": 500, "stream": True, "timeout": 4}
    writer.write(request_bytes(body))
    await until(lambda: any(transport.get_write_buffer_size() > 50_000 for transport in served.gateway_transports()))
    await until(lambda: len(served.tokenizer.ended) == 1)
    assert served.tokenizer.running == 0
    assert served.gateway.admission.active == 1
    assert (await served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200
    writer.transport.abort()
    await until(lambda: served.gateway.admission.active == 0)


async def test_connections_are_closed_while_draining(served: Any) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(served.url + "/health") as answer:
            assert answer.headers.get("Connection") != "close"
        served.gateway.admission.draining = True
        for path in ("/health", "/ready", "/v1/models"):
            async with session.get(served.url + path) as answer:
                assert answer.headers["Connection"] == "close"
        async with session.post(served.url + "/v1/completions", json={"prompt": "x"}) as answer:
            assert (answer.status, answer.headers["Connection"]) == (503, "close")
            assert int(answer.headers["Retry-After"]) >= 1
