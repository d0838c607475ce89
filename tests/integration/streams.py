"""What the tests of this folder read of a server: whole answers, and streams chunk by chunk."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def stream_of(server: Any, path: str, body: dict[str, Any], timeout: float = 120) -> list[dict[str, Any]]:
    """The chunks of a streamed answer. Every line must be UTF-8, every event JSON, and ``[DONE]`` the last one."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        lines = [line.decode("utf-8", "strict").rstrip("\n") for line in answer]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert all(line.startswith("data: ") for line in lines if line)
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def refusal(server: Any, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Status and error object of a request that must be refused."""
    try:
        answer = server.post(path, body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]
    raise AssertionError(f"not refused: {answer}")


class Joined:
    """A stream put together again, choice by choice."""

    def __init__(self, chunks: list[dict[str, Any]]) -> None:
        self.chunks = chunks
        self.text: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.stop_reason: dict[int, Any] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[dict[str, Any]]] = {}
        """The logprobs objects of the chunks that have one."""
        self.usage = chunks[-1].get("usage")
        for chunk in chunks:
            for choice in chunk["choices"]:
                self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        assert index not in self.finish, "a chunk after the finish reason"
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        self.text[index] = self.text.get(index, "") + text
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        if choice.get("logprobs"):
            self.logprobs.setdefault(index, []).append(choice["logprobs"])
        assert "finish_reason" in choice
        if choice["finish_reason"] is not None:
            self.finish[index] = choice["finish_reason"]
            self.stop_reason[index] = choice.get("stop_reason")

    def column(self, index: int, name: str) -> list[Any]:
        """One list of a choice's logprobs, chunks joined."""
        return [value for part in self.logprobs.get(index, []) for value in part[name]]


def both(server: Any, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], Joined]:
    """The same request not streamed and streamed; text, end and logprobs must agree, choice by choice."""
    whole, joined = server.post(path, body), Joined(stream_of(server, path, body))
    for choice in whole["choices"]:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert joined.text[index] == text
        assert joined.finish[index] == choice["finish_reason"]
        assert joined.stop_reason[index] == choice["stop_reason"]
        for name, column in (choice["logprobs"] or {}).items():
            if column is not None:
                assert joined.column(index, name) == column, name
    assert len(joined.text) == len(whole["choices"])
    return whole, joined


def raw_post(server: Any, path: str, body: bytes | str, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, headers and JSON of an answer to a body that is sent as it is."""
    parts = urllib.parse.urlsplit(server.url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
