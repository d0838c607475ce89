"""Clients that come back: ``Last-Event-ID`` at the same gateway and at another one, after every event."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from fake_tokenizer import Script, Token, until

from api_gateway.event_ids import EventIds, parse_event_id
from api_gateway.request_log import ChoiceLog, Position, TextOffset
from shared.errors import ErrorCode
from shared.hop import Request, digest
from shared.messages import End, ErrorInfo, FinishReason, TextSpec
from shared.sampling import SamplingParams

CHECK = b"checked"
Event = tuple[str, Any]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 8}
TEXT: dict[str, Any] = {"prompt": "tell me", "max_tokens": 8}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def asking(rid: str, last: str = "0") -> dict[str, str]:
    return {"X-Request-Id": rid, "Last-Event-ID": last}


@contextlib.asynccontextmanager
async def opened(served: Any, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a stream, as (id, value)."""
    async with served.http.post(served.url + path_of(body), json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        yield events_of(answer.content)


async def events_of(content: aiohttp.StreamReader) -> AsyncIterator[Event]:
    name = ""
    async for line in content:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "id":
            name = value
        elif field == "data":
            yield name, value if value == "[DONE]" else json.loads(value)
        else:
            assert not field


async def whole(served: Any, body: dict[str, Any], headers: dict[str, str]) -> list[Event]:
    async with opened(served, body, headers) as events:
        return [event async for event in events]


def joined(events: list[Event]) -> dict[str, Any]:
    """All that a client has learnt from events."""
    found: dict[str, Any] = {
        "role": [],
        "text": {},
        "finish": [],
        "logprobs": {},
        "ids": {},
        "usage": None,
        "names": set(),
    }
    for _, value in events:
        if value == "[DONE]":
            found["done"] = found.get("done", 0) + 1
            continue
        found["names"].add((value["id"], value["created"], value["model"]))
        found["usage"] = value.get("usage") or found["usage"]
        for choice in value["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            found["role"] += [index] if "role" in delta else []
            found["text"][index] = found["text"].get(index, "") + (choice.get("text") or delta.get("content") or "")
            found["ids"].setdefault(index, []).extend(choice.get("token_ids", []))
            for name, column in (choice["logprobs"] or {}).items():
                if column is not None:
                    found["logprobs"].setdefault((index, name), []).extend(column)
            if choice["finish_reason"] is not None:
                found["finish"].append((index, choice["finish_reason"], choice["stop_reason"]))
    found["role"].sort()
    found["finish"].sort()
    return found


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        TEXT | {"n": 2, "logprobs": 1, "echo": True, "return_token_ids": True},
        TEXT | {"prompt": ["one", "held two"], "logprobs": 2, "stop": ["x"]},
        CHAT | {"messages": [{"role": "user", "content": "held late"}], "n": 2},
    ],
    ids=["chat", "chat n=3", "echo", "two prompts", "held"],
)
async def test_after_any_event_the_rest_comes_at_another_gateway(serve: Any, body: dict[str, Any]) -> None:
    first = await serve()
    second = await serve(tokenizers=0, tokenizer_endpoint=[first.tokenizer.endpoint])
    body = body | STREAMED
    events = await whole(first, body, asking("mine"))
    expected = joined(events)
    assert expected["usage"]["completion_tokens"] == 8 * len(expected["text"])
    for count in range(len(events)):
        last = events[count - 1][0] if count else "0"
        rest = await whole(second, body, asking("mine", last))
        got = joined([*events[:count], *rest])
        if not count:  # the time of this answer is its own
            got["names"] = expected["names"]
        assert got == expected, count
    assert len(first.tokenizer.requests) == (2 if isinstance(body.get("prompt"), list) else 1)


@pytest.mark.parametrize("options", [{}, {"stop": ["never"]}, {"echo": True}], ids=["plain", "held", "echo"])
async def test_offsets_go_on_without_the_records_before(serve: Any, options: dict[str, Any]) -> None:
    """Who gave the rows to a new tokenizer had their records, and is gone; tokens begin within characters."""
    first = await serve()
    second = await serve(tokenizers=0, tokenizer_endpoint=[first.tokenizer.endpoint])
    parts = ["é".encode(), *(bytes([byte]) for byte in "🫠€".encode()), b"x", b"\xf0\x9f", b"y", "zü".encode(), b"."]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(part) for part in parts]
    if "stop" in options:
        pieces = ["", *pieces[:-2], "".join(pieces[-2:])]
    first.tokenizer.scripts["faces"] = Script(
        [Token(number, part, piece) for number, (part, piece) in enumerate(zip(parts, pieces, strict=True))]
    )
    body = TEXT | STREAMED | {"prompt": "faces", "max_tokens": 20, "logprobs": 1, "return_token_ids": True} | options
    events = await whole(first, body, asking("mine"))
    expected = joined(events)
    assert expected["text"][0].endswith("é🫠€x\ufffdyzü.")
    (log,) = first.tokenizer.requests[0].logs
    for count in range(1, len(events)):
        shown = len(joined(events[:count])["ids"].get(0, []))
        log.records[:shown] = [b""] * shown
        rest = await whole(second, body, asking("mine", events[count - 1][0]))
        assert joined([*events[:count], *rest]) == expected, count
    assert first.tokenizer.requests[0].logs == [log]


async def test_counts_go_on_with_continuous_usage(serve: Any) -> None:
    first = await serve()
    body = TEXT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = await whole(first, body, asking("mine"))
    rest = await whole(first, body, asking("mine", events[2][0]))
    counts = [value["usage"]["completion_tokens"] for _, value in [*events[:3], *rest] if value != "[DONE]"]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert rest[0][1]["usage"]["completion_tokens"] > events[2][1]["usage"]["completion_tokens"]


async def test_a_broken_connection_is_taken_up_while_the_text_is_made(serve: Any) -> None:
    first = await serve()
    second = await serve(tokenizers=0, tokenizer_endpoint=[first.tokenizer.endpoint])
    first.tokenizer.step_s = 0.02
    body = CHAT | STREAMED | {"max_tokens": 30}
    got: list[Event] = []
    async with opened(first, body, asking("mine")) as events:
        async for event in events:
            got.append(event)
            if len(got) == 5:
                break
    got += await whole(second, body, asking("mine", got[-1][0]))
    assert joined(got)["text"][0] == "".join(f"0:{k} " for k in range(30))
    assert joined(got)["usage"]["completion_tokens"] == 30
    assert len(first.tokenizer.requests) == 1


@pytest.mark.parametrize("same", [True, False])
async def test_a_live_stream_that_another_connection_takes_over_closes_without_an_end(serve: Any, same: bool) -> None:
    first = await serve()
    other = first if same else await serve(tokenizers=0, tokenizer_endpoint=[first.tokenizer.endpoint])
    first.tokenizer.step_s = 0.05
    body = CHAT | STREAMED | {"max_tokens": 40}
    async with opened(first, body, asking("mine")) as events:
        got = [await anext(events) for _ in range(3)]
        taken = asyncio.create_task(whole(other, body, asking("mine", got[-1][0])))
        seen = []
        with contextlib.suppress(aiohttp.ClientPayloadError):
            seen = [event async for event in events]
        assert "[DONE]" not in [value for _, value in seen]
        assert len(seen) < 35
        rest = await taken
    assert joined([*got, *rest])["text"][0] == "".join(f"0:{k} " for k in range(40))
    assert rest[-1][1] == "[DONE]"


async def test_not_streamed_the_same_request_has_the_same_answer(serve: Any) -> None:
    first = await serve()
    second = await serve(tokenizers=0, tokenizer_endpoint=[first.tokenizer.endpoint])
    first.tokenizer.step_s = 0.05
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.2):
            await first.post(path_of(TEXT), TEXT, headers=asking("mine"))
    status, answer, headers = await second.post(path_of(TEXT), TEXT, headers=asking("mine"))
    assert (status, headers["X-Request-Id"]) == (200, "mine")
    again = (await first.post(path_of(TEXT), TEXT, headers=asking("mine")))[1]
    assert (answer["choices"], answer["usage"]) == (again["choices"], again["usage"])
    assert len(first.tokenizer.requests) == 1
    assert first.tokenizer.requests[0].spec.resumable


async def test_who_does_not_ask_gets_no_ids_and_is_aborted_when_it_leaves(serve: Any) -> None:
    served = await serve()
    body = TEXT | {"prompt": "hold", "stream": True}
    async with opened(served, TEXT | STREAMED, {"X-Request-Id": "mine"}) as events:
        assert not any([name async for name, _ in events])
    for headers, kept in (({}, 0), (asking("mine"), 1)):
        async with opened(served, body, headers):
            await until(lambda: served.gateway.generations)
        await until(lambda: not served.gateway.generations)
        await until(lambda kept=kept: len(served.tokenizer.child.requests) == kept)


async def test_two_who_ask_with_the_same_id_and_other_bodies_do_not_meet(serve: Any) -> None:
    served = await serve()
    answers = [await served.post(path_of(body), body, headers=asking("mine")) for body in (TEXT, TEXT | {"seed": 5})]
    assert [status for status, _, _ in answers] == [200, 200]
    assert len({request.rid for request in served.tokenizer.requests}) == 2
    seeds = [request.spec.params.seed for request in served.tokenizer.requests]
    assert seeds[1] == 5
    assert seeds[0] not in (None, 5)


@pytest.mark.parametrize(
    ("change", "headers", "words"),
    [
        ({"max_tokens": 9}, {}, "belongs to another request"),
        ({"stream_options": {"include_usage": False}}, {}, "belongs to another request"),
        ({}, {"X-Request-Id": "other"}, "belongs to another request"),
        ({}, {"X-Request-Id": None}, "needs the X-Request-Id"),
        ({}, {"Last-Event-ID": "what?"}, "must be 0 or the id of an event"),
        ({}, {"Last-Event-ID": ""}, "must be 0 or the id of an event"),
        ({"stream": False, "stream_options": None}, {}, "without stream"),
        ({"n": 65}, {"Last-Event-ID": "0"}, "at most 64 choices, not 65"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(
    serve: Any, change: dict[str, Any], headers: dict[str, Any], words: str
) -> None:
    served = await serve()
    body = CHAT | STREAMED
    events = await whole(served, body, asking("mine"))
    sent = {name: value for name, value in (asking("mine", events[2][0]) | headers).items() if value is not None}
    changed = {name: value for name, value in (body | change).items() if value is not None}
    status, answer, _ = await served.post(path_of(body), changed, headers=sent)
    assert (status, answer["error"]["param"]) == (400, "Last-Event-ID")
    assert words in answer["error"]["message"]


async def test_another_key_is_another_request(serve: Any) -> None:
    served = await serve(api_key=["one", "two"])
    body = CHAT | STREAMED
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    events = await whole(served, body, asking("mine") | one)
    status, answer, _ = await served.post(path_of(body), body, headers=asking("mine", events[2][0]) | two)
    assert status == 400
    assert "API key" in answer["error"]["message"]


async def test_what_nobody_has_is_computed_again_or_lost(serve: Any) -> None:
    served = await serve()
    body = CHAT | STREAMED
    events = await whole(served, body, asking("mine"))
    (request,) = served.tokenizer.child.requests.values()
    served.tokenizer.child.drop(request)
    rest = await whole(served, body, asking("mine", events[3][0]))
    assert joined([*events[:4], *rest]) == joined(events)
    assert len(served.tokenizer.requests) == 2

    (request,) = served.tokenizer.child.requests.values()
    served.tokenizer.child.drop(request)
    lost = ErrorInfo(ErrorCode.LOST, "the output can no longer be continued; start it again")
    served.tokenizer.begin = lambda request: served.tokenizer.child.fail(request, lost)
    status, answer, _ = await served.post(path_of(body), body, headers=asking("mine", events[3][0]))
    assert (status, answer["error"]["message"]) == (500, lost.message)


async def test_other_ids_than_the_client_has_end_it(serve: Any) -> None:
    served = await serve()
    body = CHAT | STREAMED
    events = await whole(served, body, asking("mine"))
    padded = events[4][0] + "=" * (-len(events[4][0]) % 4)
    data = bytearray(base64.urlsafe_b64decode(padded))
    data[16] ^= 1  # of the digest
    forged = base64.urlsafe_b64encode(bytes(data)).decode().rstrip("=")
    (_, error), (_, done) = await whole(served, body, asking("mine", forged))
    assert "can no longer be continued" in error["error"]["message"]
    assert done == "[DONE]"


async def test_when_all_choices_have_ended_the_end_comes_at_once(serve: Any) -> None:
    served = await serve()
    body = CHAT | STREAMED | {"n": 2}
    events = await whole(served, body, asking("mine"))
    finish, usage = events[-3][0], events[-2][0]
    for tokenizer in served.tokenizers:
        await tokenizer.stop()
    assert await whole(served, body, asking("mine", finish)) == events[-2:]
    assert await whole(served, body, asking("mine", usage)) == [("", "[DONE]")]


class TestEventIds:
    @pytest.mark.parametrize("tokens", [0, 1, 15, 16, 300, 2**31 - 1])
    def test_an_id_says_what_went_into_it(self, tokens: int) -> None:
        positions = [
            Position(tokens, digest(range(3)) if tokens else digest(()), True, True, False),
            Position(ended=True, begun=True),
            Position(tokens, digest(range(3)) if tokens else digest(()), True, offset=TextOffset(70_000, b"\xf0\x9f")),
            Position(begun=True, offset=TextOffset(0, b"")),
        ]
        ids = EventIds(CHECK, 1_800_000_000, choices(4), ())
        for index, position in enumerate(positions):
            ids.move(index, position)
        ids.usage()
        place = parse_event_id(text_of(ids), CHECK, choices=4, prompts=1, with_usage=False)
        assert (place.created, place.positions, place.usage_sent) == (1_800_000_000, positions, True)

    def test_every_broken_id_is_an_error_in_words(self) -> None:
        ids = EventIds(CHECK, 1, choices(1), ())
        ids.move(0, Position(5, digest(range(5)), True))
        text = text_of(ids)
        assert len(text) < 45
        ids.move(0, Position(5, digest(range(5)), True, offset=TextOffset(9, b"\xf0\x9f\xab")))
        text = text_of(ids)
        assert len(text) < 52
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        longer = base64.urlsafe_b64encode(data.replace(b"\3\xf0\x9f\xab", b"\4\xf0\x9f\xab\xa0")).decode().rstrip("=")
        assert longer != text
        cuts = [text[:cut] for cut in range(len(text))]
        for broken in [*cuts, longer, text + "AAAA", "ü", "a b", "//" + text, "9" * 8000]:
            with pytest.raises((ValueError, LookupError)):
                parse_event_id(broken, CHECK, choices=1, prompts=1, with_usage=False)
        with pytest.raises(LookupError):
            parse_event_id(text, b"another", choices=1, prompts=1, with_usage=False)

    @pytest.mark.parametrize(
        ("ids", "end", "lost"),
        [
            ([1, 2], None, False),
            ([1, 2, 3], None, False),
            ([1, 2, 4], None, True),
            ([1, 2, 3, 4], End(FinishReason.STOP), False),
            ([1, 2], End(FinishReason.STOP), True),
        ],
    )
    def test_only_what_the_client_has_can_be_continued(self, ids: list[int], end: End | None, lost: bool) -> None:
        (choice,) = choices(1)
        choice.resume(Position(3, digest([1, 2, 3]), True), 0.0)
        choice.rows.grow(ids)
        choice.rows.end = end
        assert choice.lost is lost
        assert choice.behind is (len(ids) < 3 and end is None)

    def test_a_row_whose_record_is_gone_is_lost(self) -> None:
        (choice,) = choices(1, logprobs=0)
        choice.resume(Position(1, digest([1]), True), 0.0)
        choice.rows.grow([1, 2], [b"", b"record"])
        assert not choice.lost
        choice.rows.grow([3], [b""])
        assert choice.lost


def choices(count: int, **params: Any) -> list[ChoiceLog]:
    request = Request("r", TextSpec(SamplingParams(n=count, **params), text="x"))
    return [ChoiceLog(log, index) for index, log in enumerate(request.logs)]


def text_of(ids: EventIds) -> str:
    line = ids.line().decode()
    assert line.startswith("id: ")
    assert line.endswith("\n")
    return line[4:-1]
