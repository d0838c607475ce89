"""One streamed request: which events count as outputs, which tokens, and what is a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import pytest

from headrace.bench.datasets import SampleRequest
from headrace.bench.metrics import RequestRecord
from headrace.bench.requests import Client, EventReader, Target, error_text

SAMPLE = SampleRequest([5, 6, 7], 3, 4)
DONE = b"data: [DONE]\n\n"
Api = Literal["completions", "chat"]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(words: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish}], "usage": None})


def delta(finish: str | None = None, **fields: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def read(api: Api, *arrivals: tuple[float, bytes]) -> RequestRecord:
    record = RequestRecord(prompt_tokens=3)
    reader = EventReader(record, api)
    for now, data in arrivals:
        reader.feed(data, now)
    reader.close()
    return record


def test_an_event_of_a_completion_is_an_output_even_without_text() -> None:
    arrivals = ((1.0, text("a")), (2.0, text("")), (3.0, text("b", "stop")), (9.0, usage(11, 5) + DONE))
    record = read("completions", *arrivals)
    assert (record.output_times, record.ended, record.text, record.error) == ([1.0, 2.0, 3.0], 3.0, "ab", "")


def test_the_bare_reason_to_finish_is_the_end_but_no_output() -> None:
    record = read("completions", (1.0, text("a")), (3.0, text("", "length")), (9.0, usage(11, 1) + DONE))
    assert (record.output_times, record.ended, record.error) == ([1.0], 3.0, "")


def test_the_role_and_the_empty_end_of_a_chat_are_no_outputs() -> None:
    role, end = delta(role="assistant", content=""), delta("stop")
    record = read("chat", (1.0, role), (2.0, delta(content="a")), (4.0, delta(content="b")), (5.0, end + DONE))
    assert (record.output_times, record.ended, record.text, record.error) == ([2.0, 4.0], 5.0, "ab", "")


def test_a_chat_without_any_text_has_its_end_for_an_output() -> None:
    record = read("chat", (1.0, delta(role="assistant", content="")), (2.0, delta("stop")), (3.0, usage(4, 1) + DONE))
    assert (record.output_times, record.ttft_s, record.output_tokens, record.error) == ([2.0], 2.0, 1, "")


def test_tokens_are_those_of_usage_and_not_the_events() -> None:
    record = read("completions", (1.0, text("three tokens")), (2.0, text("", "length")), (2.0, usage(50, 7) + DONE))
    assert (record.prompt_tokens, record.output_tokens, len(record.output_times)) == (50, 7, 1)


def test_without_usage_each_event_is_a_token() -> None:
    record = read("completions", (1.0, text("a")), (2.0, text("b", "stop") + DONE))
    assert (record.prompt_tokens, record.output_tokens) == (3, 2)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_events_are_found_however_they_are_cut(ends: bytes) -> None:
    stream = (b": ping\n\n" + text("a") + text("é") + usage(9, 2) + DONE).replace(b"\n", ends)
    record = read("completions", *((float(index), bytes([byte])) for index, byte in enumerate(stream)))
    assert (record.text, record.output_tokens, record.error) == ("aé", 2, "")


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (text("a"), "the stream ended without [DONE]"),
        (usage(1, 0) + DONE, "the stream ended without an output"),
        (text("a") + event({"error": {"message": "the worker is gone", "code": 500}}) + DONE, "the worker is gone"),
    ],
)
def test_a_stream_that_does_not_end_well_is_a_failure(stream: bytes, error: str) -> None:
    assert read("completions", (1.0, stream)).error == error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"message":"not found"}', "not found"),
        (b'{"error":"no"}', "no"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
    ],
)
def test_error_bodies_are_put_in_words(body: bytes, words: str) -> None:
    assert error_text(body) == words


def test_bodies_of_both_apis() -> None:
    common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.5}
    fields = {"temperature": 0.5}
    target = Target("", "completions", "m", ignore_eos=True, logprobs=2, fields=fields)
    completion = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2}
    assert json.loads(target.body(SAMPLE)) == completion | common
    target = Target("", "chat", "m", ignore_eos=True, logprobs=2, fields=fields)
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4}
    assert json.loads(target.body(SampleRequest("hi", 1, 4))) == chat | common | {"logprobs": True, "top_logprobs": 2}


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of(handler: Handler) -> AsyncIterator[tuple[Client, list[int]]]:
    """A client of a server that does ``handler`` on each connection, and the request counts of the connections."""
    counts: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts.append(0)
        index = len(counts) - 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
                counts[index] += 1
                await handler(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        port = server.sockets[0].getsockname()[1]
        yield Client(session, Target(f"http://127.0.0.1:{port}/v1/completions", "completions", "m")), counts


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_connections_are_used_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunked(text("a") + text("b", "length")) + chunked(usage(3, 2) + DONE) + chunked(b""))

    async with client_of(answer) as (client, counts):
        records = [await client.send(SAMPLE) for _ in range(3)]
    assert [(record.error, record.output_tokens) for record in records] == [("", 2)] * 3
    assert (counts, client.without_usage) == ([3], 0)
    assert all(0 < record.sent < record.output_times[0] <= record.ended for record in records)


async def test_a_server_that_tells_no_usage_is_noticed() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunked(text("a", "stop") + DONE) + chunked(b""))

    async with client_of(answer) as (client, _):
        await client.send(SAMPLE)
    assert client.without_usage == 1


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "ServerDisconnectedError"),
        (HEAD + chunked(text("a")), "ClientPayloadError"),
        (HEAD + chunked(b"data: {\n\n") + chunked(b""), "JSONDecodeError"),
        (HEAD + chunked(text("a")) + chunked(b""), "the stream ended without [DONE]"),
        (b'HTTP/1.1 429 Too Many\r\nContent-Length: 28\r\n\r\n{"error":{"message":"full"}}', "HTTP 429: full"),
    ],
    ids=["at once", "midway", "no JSON", "no end", "refused"],
)
async def test_a_server_that_hangs_up_or_refuses_is_a_failure(data: bytes, error: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    async with client_of(answer) as (client, _):
        record = await client.send(SAMPLE)
    assert record.error.startswith(error)


async def test_nobody_there_is_a_failure() -> None:
    async with aiohttp.ClientSession() as session:
        record = await Client(session, Target("http://127.0.0.1:9/v1/completions", "completions", "m")).send(SAMPLE)
    assert record.error.startswith("ClientConnectorError: ")
