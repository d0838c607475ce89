"""One streamed request of the OpenAI API, and when its outputs arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from headrace.bench.datasets import SampleRequest
from headrace.bench.metrics import RequestRecord

_DONE = b"[DONE]"


@dataclass(frozen=True)
class Target:
    """Where requests go, and what all of them have in common."""

    url: str
    api: Literal["completions", "chat"]
    model: str
    ignore_eos: bool = False
    logprobs: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the body, sampling parameters for example."""

    def body(self, sample: SampleRequest) -> bytes:
        """The JSON of a request; for chat, ``sample.prompt`` is the text of one user message."""
        body: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": sample.prompt}]
            body["max_completion_tokens"] = sample.expected_output_len
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.expected_output_len}
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps(body | dict(self.fields))


class EventReader:
    """Server-sent events of one response, cut into outputs with the times at which they arrived.

    An output is an event with text, and of completions also one without any, whose token shows none. What only tells
    the role or the reason to finish is no output, but the latter is the end of the request, and its first output if
    there was none. The tokens are those of ``usage``; a server that sends none is taken to send one token an event
    (``counted_events`` is true then).
    """

    def __init__(self, record: RequestRecord, api: Literal["completions", "chat"]) -> None:
        self._record = record
        self._chat = api == "chat"
        self._rest = b""
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] | None = None
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at ``now``. Raises ``ValueError`` for what is no event of the API."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip(), now)

    def close(self) -> None:
        """The response is over: fill in the rest of the record, and its error if something is missing."""
        record, usage = self._record, self._usage or {}
        record.text = "".join(self._texts)
        record.output_tokens = usage.get("completion_tokens") or len(record.output_times)
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
        if record.error:
            return
        if not record.ended:
            record.error = "the stream ended without an output"
        elif not self._done:
            record.error = "the stream ended without [DONE]"
        elif not record.output_times:
            record.output_times.append(record.ended)

    @property
    def counted_events(self) -> bool:
        """Whether the output tokens are a count of events, because the server told no usage."""
        return self._usage is None

    def _take(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self._done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self._record.error = error_text(data)
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = (delta.get("content") or delta.get("reasoning_content")) if self._chat else choice["text"]
            finished = choice.get("finish_reason") is not None
            if text or not (finished or self._chat):
                self._record.output_times.append(now)
                self._texts.append(text or "")
                self._record.ended = now
            elif finished:
                self._record.ended = now


class Client:
    """Sends requests over connections that it keeps, and notes what a run should be told of."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target
        self.without_usage = 0
        """Responses whose tokens were counted by events."""

    async def send(self, sample: SampleRequest) -> RequestRecord:
        """Send one request and read its answer to the end. Whatever fails is in the record's ``error``."""
        body = self._target.body(sample)
        record = RequestRecord(prompt_tokens=sample.prompt_len, sent=time.perf_counter())
        try:
            async with self._session.post(self._target.url, data=body) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {error_text(await response.read())}"
                    return record
                reader = EventReader(record, self._target.api)
                try:
                    async for data in response.content.iter_any():
                        reader.feed(data, time.perf_counter())
                finally:
                    reader.close()
                self.without_usage += not record.error and reader.counted_events
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            record.error = f"{type(error).__name__}: {error}".rstrip(": ")
        return record


def error_text(body: bytes) -> str:
    """The message of an error body of the OpenAI API, or else the body itself, cut."""
    try:
        found = orjson.loads(body)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, AttributeError):
        return body[:200].decode(errors="replace")
