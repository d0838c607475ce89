"""Several tokenizers, tokenizers that leave and come back, and those that do not fit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import aiohttp
import pytest
from fake_tokenizer import CARD, FakeTokenizer, until
from joined_answers import ask

from shared.messages import Attempt, Hello


async def stream_text(served: Any, count: int) -> str:
    """The text of a streamed completion of that many tokens."""
    body = {"prompt": "x", "max_tokens": count, "stream": True}
    async with served.http.post(served.url + "/v1/completions", json=body) as answer:
        lines = (await answer.text()).split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])


async def test_requests_spread_over_tokenizers(serve: Any) -> None:
    served = await serve(tokenizers=2)
    await until(lambda: all(tokenizer.hellos for tokenizer in served.tokenizers))
    await asyncio.gather(*(stream_text(served, 5) for _ in range(20)))
    assert all(tokenizer.requests for tokenizer in served.tokenizers)
    assert sum(len(tokenizer.requests) for tokenizer in served.tokenizers) == 20


@pytest.mark.parametrize("tokenizers", [1, 2])
async def test_a_stream_goes_on_at_another_or_a_restarted_tokenizer(serve: Any, tokenizers: int) -> None:
    served = await serve(tokenizers=tokenizers)
    reading = asyncio.create_task(stream_text(served, 200))
    await until(lambda: any(t.running and len(next(iter(t.logs)).ids) > 10 for t in served.tokenizers))
    busy = next(tokenizer for tokenizer in served.tokenizers if tokenizer.running)
    await busy.stop()
    restarted = FakeTokenizer(busy.endpoint)
    if tokenizers == 1:
        await restarted.start()
    assert await asyncio.wait_for(reading, 20) == "".join(f"0:{number} " for number in range(200))
    await restarted.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokenizers", [1, 2])
async def test_entries_and_the_echoed_prompt_survive_a_tokenizer(serve: Any, tokenizers: int, stream: bool) -> None:
    served = await serve(tokenizers=tokenizers)
    body = {"prompt": "say", "echo": True, "logprobs": 2, "max_tokens": 200, "n": 2}
    undisturbed = await ask(served, "completions", body)
    asking = asyncio.create_task(ask(served, "completions", body, stream=stream))
    await until(lambda: any(t.running and len(next(iter(t.logs)).ids) > 10 for t in served.tokenizers))
    busy = next(tokenizer for tokenizer in served.tokenizers if tokenizer.running)
    await busy.stop()
    restarted = FakeTokenizer(busy.endpoint)
    if tokenizers == 1:
        await restarted.start()
    assert (await asyncio.wait_for(asking, 20)).choices == undisturbed.choices
    await restarted.stop()


async def test_another_model_is_refused_in_words(serve: Any) -> None:
    served = await serve(tokenizers=2)
    other = served.tokenizers[1]
    other.card = dataclasses.replace(CARD, digest="other", model="else")
    await until(lambda: any(hello.refusal for hello in other.hellos))
    assert other.hellos[-1].refusal == "fake serves else, the others fake"
    assert (await served.get("/ready"))[0] == 200
    for _ in range(8):
        await stream_text(served, 1)
    assert len(served.tokenizer.requests) == 8


async def test_another_protocol_is_refused_in_words(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = Hello("tokenizer", "new", 7, 9, True, CARD)
    monkeypatch.setattr(FakeTokenizer, "_hello", lambda self: hello)
    served = await serve(wait=False)
    await until(lambda: any(hello.refusal for hello in served.tokenizer.hellos))
    status, text, _ = await served.get("/ready")
    assert (status, json.loads(text)["status"]) == (503, "new speaks protocol 7 to 9, this gateway 2 to 3")


async def test_a_tokenizer_that_refuses_us_is_not_ready(serve: Any) -> None:
    served = await serve(wait=False)
    served.tokenizer.refusal = "it speaks protocol 1, this side 2"
    await until(lambda: "this side 2" in (served.gateway.not_ready() or ""))
    assert "this side 2" in (await served.get("/ready"))[1]


async def test_running_requests_end_when_no_tokenizer_comes_back(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api_gateway.tokenizer_link.LOST_S", 1.0)
    served = await serve()
    asked = [asyncio.create_task(served.post("/v1/completions", {"prompt": "hold"}))]
    await until(lambda: served.tokenizer.requests)
    await served.tokenizer.stop()
    for status, error, headers in await asyncio.gather(*asked):
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "no tokenizer has answered" in error["error"]["message"]


async def test_a_request_that_lives_elsewhere_closes_without_a_terminal(served: Any) -> None:
    async def read() -> None:
        async with served.http.post(served.url + "/v1/completions", json={"prompt": "hold", "stream": True}) as answer:
            begun.set()
            await answer.read()

    begun = asyncio.Event()
    reading = asyncio.create_task(read())
    whole = asyncio.create_task(served.post("/v1/completions", {"prompt": "hold"}))
    await until(lambda: len(served.tokenizer.requests) == 2)
    await asyncio.wait_for(begun.wait(), 30)
    for request in served.tokenizer.requests:
        served.tokenizer.child.supersede(request, Attempt(9, 1, 0))
    with pytest.raises(aiohttp.ClientPayloadError):
        await asyncio.wait_for(reading, 30)
    status, error, _ = await whole
    assert (status, error["error"]["message"]) == (500, "the request is served elsewhere")
    await until(lambda: served.gateway.admission.active == 0)
