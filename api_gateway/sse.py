"""Server-sent events of the OpenAI API, built from parts that are made once for each stream.

A stream of n choices is: for each choice a first chunk with the role (chat only), text chunks with ``finish_reason``
null, and one finish chunk; then the usage chunk if it was asked for, with empty ``choices``; then ``[DONE]``. An error
after the headers is an ``error`` event and ``[DONE]``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from api_gateway.request_log import Usage

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class ChunkFormat:
    """The chunks of one stream: only the text is escaped for each token.

    Args:
        kind: which endpoint.
        completion_id, created, model: as in every chunk.
        include_usage: chunks carry ``usage`` (null but for the last one).
        with_token_ids: chunks carry ``token_ids``.
    """

    def __init__(
        self,
        kind: Literal["chat", "completions"],
        completion_id: str,
        created: int,
        model: str,
        *,
        include_usage: bool,
        with_token_ids: bool,
    ) -> None:
        self._chat = kind == "chat"
        self._with_token_ids = with_token_ids
        self._envelope = {
            "id": completion_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + orjson.dumps(self._envelope)[:-1] + b',"choices":[{"index":'
        self._open = b',"delta":{"content":' if self._chat else b',"text":'
        self._close = b"}" if self._chat else b""
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._fast_tail = self._close + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._heads: dict[int, bytes] = {}

    def role(self, index: int, usage: Usage | None = None) -> bytes:
        """The first chunk of a chat choice; nothing for completions."""
        if not self._chat:
            return b""
        return b"".join(
            (
                self._head,
                b"%d" % index,
                b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]',
                self._usage(usage),
            )
        )

    def text(
        self,
        index: int,
        text: str,
        ids: array[int] | None = None,
        usage: Usage | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        """A chunk of text; ``usage`` only with continuous usage."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head + b"%d" % index + self._open
        if usage is None and logprobs is None and not self._with_token_ids:
            return head + orjson.dumps(text) + self._fast_tail
        return b"".join(
            (
                head,
                orjson.dumps(text),
                self._close,
                b',"logprobs":',
                orjson.dumps(logprobs),
                b',"finish_reason":null',
                self._token_ids(ids),
                b"}]",
                self._usage(usage),
            )
        )

    def finish(
        self,
        index: int,
        reason: str,
        stop_reason: str | int | None,
        text: str = "",
        ids: array[int] | None = None,
        usage: Usage | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The last chunk of a choice. A chat delta is empty there, so its last text must have gone before."""
        body = b',"delta":{}' if self._chat else b',"text":' + orjson.dumps(text)
        return b"".join(
            (
                self._head,
                b"%d" % index,
                body,
                b',"logprobs":',
                orjson.dumps(logprobs),
                b',"finish_reason":',
                orjson.dumps(reason),
                b',"stop_reason":',
                orjson.dumps(stop_reason),
                self._token_ids(ids),
                b"}]",
                self._usage(usage),
            )
        )

    def usage(self, usage: Usage) -> bytes:
        """The chunk after the last finish chunk."""
        return event({**self._envelope, "choices": [], "usage": usage.to_json()})

    def _token_ids(self, ids: array[int] | None) -> bytes:
        return b',"token_ids":' + orjson.dumps(list(ids or ())) if self._with_token_ids else b""

    def _usage(self, usage: Usage | None) -> bytes:
        return self._end if usage is None else b',"usage":' + orjson.dumps(usage.to_json()) + b"}\n\n"
