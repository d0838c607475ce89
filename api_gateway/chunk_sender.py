"""Writes the rows of a streamed answer to its connection."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from typing import TYPE_CHECKING

from api_gateway.choice_output import ChoiceOutput
from api_gateway.errors import error_object_of
from api_gateway.event_ids import EventIds
from api_gateway.event_stream import EventStream
from api_gateway.request_log import Position, Usage
from api_gateway.sse import DONE, ChunkFormat, event

if TYPE_CHECKING:
    from api_gateway.generation import Generation


class ChunkSender:
    """Turns new rows of a generation into chunks, one write for each flush."""

    def __init__(self, generation: Generation, stream: EventStream) -> None:
        request = generation.request
        self._generation = generation
        self._stream = stream
        self._outputs = [
            ChoiceOutput(request, prompt, choice) for prompt in generation.prompts for choice in prompt.choices
        ]
        self._news = {choice.index for choice in generation.choices if choice.rows.rows}
        resumed = {choice.index: choice.resumed for choice in generation.choices if choice.resumed is not None}
        self._delivered = sum(position.tokens for position in resumed.values())
        """Tokens that the client has."""
        self._begun = {index for index, position in resumed.items() if position.begun}
        self._ids = _event_ids(generation)
        self._wake = asyncio.Event()
        self._closed = False
        self._format = ChunkFormat(
            request.kind,
            generation.completion_id,
            generation.created,
            request.model,
            include_usage=request.include_usage,
            with_token_ids=request.shown.token_ids,
        )

    def mark(self, index: int) -> None:
        """A choice has news."""
        self._news.add(index)

    def flush(self) -> None:
        """Write all news in one piece, or leave them for ``run`` while the reader is behind."""
        if self._closed:
            return
        if self._stream.blocked or self._generation.superseded:
            self._wake.set()
            return
        parts: list[bytes] = []
        news, self._news = self._news, set()
        for index in sorted(news):
            output = self._outputs[index]
            if output.ready:
                self._render(output, parts)
            else:
                self._news.add(index)
        if self._generation.finished.is_set():
            self._render_last(parts)
            self._closed = True
            self._wake.set()
        self._stream.write(b"".join(parts))

    async def run(self) -> None:
        """Flush at the start and after each time that the reader fell behind, until all is written."""
        self.flush()
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            if self._generation.superseded:
                raise ConnectionResetError("the request is served elsewhere")
            await self._stream.drained()
            self.flush()

    def _render(self, output: ChoiceOutput, parts: list[bytes]) -> None:
        request, choice = self._generation.request, output.choice
        index = choice.index
        text, ids, logprobs = output.take()
        ending = choice.ended and not choice.end_sent
        if index not in self._begun and (ids or ending):
            self._begun.add(index)
            self._put_role(index, parts)
        self._delivered += len(ids)
        usage = self._usage() if request.continuous_usage else None
        wanted = text or logprobs is not None or (ids and (usage is not None or request.shown.token_ids))
        if wanted and (request.kind == "chat" or not ending):
            self._put(parts, self._format.text(index, text, ids, usage, logprobs), output)
            text, ids, logprobs = "", array("i"), None
        if ending:
            choice.end_sent = True
            reason = choice.finish_reason or "stop"
            chunk = self._format.finish(index, reason, choice.stop_reason, text, ids, usage, logprobs)
            self._put(parts, chunk, output, ended=True)

    def _put_role(self, index: int, parts: list[bytes]) -> None:
        role = self._format.role(index, self._usage() if self._generation.request.continuous_usage else None)
        if self._ids is not None and role:
            self._ids.move(index, Position(begun=True))
            parts.append(self._ids.line())
        parts.append(role)

    def _put(self, parts: list[bytes], chunk: bytes, output: ChoiceOutput, *, ended: bool = False) -> None:
        """Add a chunk that brings all that was taken of a choice, and its id."""
        if self._ids is not None:
            choice = output.choice
            self._ids.move(choice.index, dataclasses.replace(choice.position, ended=ended, offset=output.offset))
            parts.append(self._ids.line())
        parts.append(chunk)

    def _usage(self) -> Usage:
        """Of what the client has so far."""
        return dataclasses.replace(self._generation.usage(), completion_tokens=self._delivered)

    def _render_last(self, parts: list[bytes]) -> None:
        generation = self._generation
        if generation.failure is not None:
            parts.append(event(error_object_of(generation.failure)))
        elif generation.request.include_usage and not (generation.place is not None and generation.place.usage_sent):
            if self._ids is not None:
                self._ids.usage()
                parts.append(self._ids.line())
            parts.append(self._format.usage(generation.usage()))
        parts.append(DONE)


def _event_ids(generation: Generation) -> EventIds | None:
    """None: the client has not asked for them. Many clients take each event for a line that begins with ``data:``."""
    resumption, with_usage = generation.resumption, generation.request.include_usage
    if resumption is None:
        return None
    return EventIds(resumption.check, generation.created, generation.choices, generation.prompts if with_usage else ())
