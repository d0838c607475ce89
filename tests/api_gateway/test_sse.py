"""The bytes of event streams."""

from __future__ import annotations

from array import array
from typing import Any

import orjson
import pytest

from api_gateway.request_log import Usage
from api_gateway.sse import ChunkFormat


def parsed(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    value: dict[str, Any] = orjson.loads(data[6:])
    return value


def chunk_format(kind: Any = "chat", *, usage: bool = False, ids: bool = False) -> ChunkFormat:
    return ChunkFormat(kind, "id-1", 17, 'a "model"', include_usage=usage, with_token_ids=ids)


def test_chat_chunks() -> None:
    chunks = chunk_format()
    base = {"id": "id-1", "object": "chat.completion.chunk", "created": 17, "model": 'a "model"'}
    assert parsed(chunks.role(1)) == base | {
        "choices": [
            {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
    }
    text = 'é "quoted"\n\\ 😀 \x00 data: x\n\n'
    assert parsed(chunks.text(0, text)) == base | {
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    }
    assert parsed(chunks.finish(0, "stop", "END")) == base | {
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}]
    }


def test_completion_chunks() -> None:
    chunks = chunk_format("completions")
    assert chunks.role(0) == b""
    chunk = parsed(chunks.text(2, "x"))
    assert chunk["object"] == "text_completion"
    assert chunk["choices"] == [{"index": 2, "text": "x", "logprobs": None, "finish_reason": None}]
    assert parsed(chunks.finish(2, "length", None, "y"))["choices"] == [
        {"index": 2, "text": "y", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_usage_is_null_until_the_last_chunk(kind: str) -> None:
    chunks = chunk_format(kind, usage=True)
    if kind == "chat":
        assert parsed(chunks.role(0))["usage"] is None
    assert parsed(chunks.text(0, "x"))["usage"] is None
    assert parsed(chunks.finish(0, "stop", None))["usage"] is None
    last = parsed(chunks.usage(Usage(3, 4, 2)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "usage" not in parsed(chunk_format(kind).text(0, "x"))


def test_continuous_usage_and_token_ids() -> None:
    chunks = chunk_format(usage=True, ids=True)
    chunk = parsed(chunks.text(0, "x", array("i", [5, 6]), Usage(3, 2, None)))
    assert chunk["choices"][0]["token_ids"] == [5, 6]
    assert chunk["usage"]["completion_tokens"] == 2
    chunk = parsed(chunks.finish(0, "stop", 7, "", array("i"), Usage(3, 2, 0)))
    assert chunk["choices"][0]["token_ids"] == []
    assert chunk["choices"][0]["stop_reason"] == 7


def test_logprobs_stand_in_the_chunk_of_their_text() -> None:
    value = {"tokens": ["x"], "token_logprobs": [-0.5], "top_logprobs": [{"x": -0.5}], "text_offset": [0]}
    chunks = chunk_format("completions")
    assert parsed(chunks.text(0, "x", logprobs=value))["choices"][0] == {
        "index": 0,
        "text": "x",
        "logprobs": value,
        "finish_reason": None,
    }
    assert parsed(chunks.finish(0, "stop", None, "x", logprobs=value))["choices"][0]["logprobs"] == value
    content = {"content": [], "refusal": None}
    choice = parsed(chunk_format().text(0, "", logprobs=content))["choices"][0]
    assert (choice["delta"], choice["logprobs"]) == ({"content": ""}, content)


def test_continuous_usage_is_in_the_first_chunk_too() -> None:
    assert parsed(chunk_format(usage=True).role(0, Usage(3, 0, None)))["usage"]["total_tokens"] == 3
