"""Asks a gateway, and joins the chunks of a stream to what the whole answer would be."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson


@dataclasses.dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclasses.dataclass
class Answer:
    """What a client has in the end, streamed or not."""

    choices: list[Choice]
    usage: dict[str, Any] | None


async def ask(served: Any, kind: str, body: dict[str, Any], *, stream: bool = False) -> Answer:
    """The answer to a request that must succeed. A stream is checked against the rules of streams, and joined."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    if not stream:
        status, answer, _ = await served.post(path, body)
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
        return Answer([_whole(choice) for choice in answer["choices"]], answer["usage"])
    async with served.http.post(served.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        return join(kind, await response.read(), (body.get("stream_options") or {}))


def _whole(choice: dict[str, Any]) -> Choice:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    lists = _lists(choice["logprobs"])
    return Choice(text, lists, choice.get("token_ids"), choice["finish_reason"], choice["stop_reason"])


def _lists(logprobs: dict[str, Any] | None) -> dict[str, list[Any]] | None:
    if logprobs is None:
        return None
    assert logprobs.get("refusal") is None
    return {name: value for name, value in logprobs.items() if name != "refusal"}


def join(kind: str, data: bytes, options: dict[str, Any]) -> Answer:
    """Of all events of a stream."""
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    usage = None
    if options.get("include_usage"):
        last = chunks.pop()
        assert last["choices"] == []
        usage = last["usage"]
        _check_usage(
            [chunk["usage"] for chunk in chunks], usage, continuous=bool(options.get("continuous_usage_stats"))
        )
    else:
        assert all("usage" not in chunk for chunk in chunks)
    joined: dict[int, Choice] = {}
    for chunk in chunks:
        (piece,) = chunk["choices"]
        assert _add(kind, piece, joined) or options.get("continuous_usage_stats"), f"an empty chunk: {chunk}"
    assert all(choice.finish_reason is not None for choice in joined.values())
    assert sorted(joined) == list(range(len(joined)))
    return Answer([joined[index] for index in sorted(joined)], usage)


def _check_usage(seen: list[Any], last: dict[str, Any], *, continuous: bool) -> None:
    if not continuous:
        assert seen == [None] * len(seen)
        return
    counts = [usage["completion_tokens"] for usage in seen]
    assert counts == sorted(counts)
    assert counts[-1] == last["completion_tokens"]
    assert all(usage["prompt_tokens"] == last["prompt_tokens"] for usage in seen)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in seen)


def _add(kind: str, piece: dict[str, Any], joined: dict[int, Choice]) -> bool:
    """Whether the chunk says anything."""
    first = piece["index"] not in joined
    choice = joined.setdefault(piece["index"], Choice())
    assert choice.finish_reason is None, "nothing comes after the finish chunk"
    if kind == "chat":
        assert piece["delta"].get("role") == ("assistant" if first else None)
        text = piece["delta"].get("content", "")
    else:
        text = piece["text"]
    news = _lists(piece["logprobs"])
    choice.text += text
    if news is not None:
        assert len({len(entries) for entries in news.values()}) == 1
        kept = choice.logprobs or {name: [] for name in news}
        choice.logprobs = {name: kept[name] + entries for name, entries in news.items()}
    if "token_ids" in piece:
        choice.token_ids = (choice.token_ids or []) + piece["token_ids"]
    choice.finish_reason, choice.stop_reason = piece["finish_reason"], piece.get("stop_reason")
    says = text or news or piece["finish_reason"] or piece.get("token_ids") or (first and kind == "chat")
    return bool(says)
