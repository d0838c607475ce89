"""One HTTP request for text while it is served: its logs, and the stream that its rows are written to."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from typing import Any

from api_gateway.choice_output import ChoiceOutput
from api_gateway.errors import error_object_of
from api_gateway.event_stream import EventStream
from api_gateway.latency import Latency
from api_gateway.request_log import ChoiceLog, PromptLog, Usage
from api_gateway.responses import completion
from api_gateway.schemas import GenerationRequest
from api_gateway.sse import DONE, ChunkFormat, event
from shared.errors import ErrorCode
from shared.hop import Request
from shared.logging import get_logger
from shared.messages import ErrorInfo

log = get_logger()


class Generation:
    """Collects what arrives for a request, and hands it on.

    The link calls ``add_prompt`` for each prompt in order; then ``on_accepted`` and ``on_rows`` as things arrive, and
    ``flush`` once for each message. The handler waits for ``opened`` and then either for ``finished`` or runs
    ``stream_to``.

    Args:
        request: what was asked for.
        completion_id: of the answer.
        latency: where times are recorded.
    """

    def __init__(self, request: GenerationRequest, completion_id: str, latency: Latency) -> None:
        self.request = request
        self.completion_id = completion_id
        self.created = int(time.time())
        self.arrived = time.monotonic()
        self.prompts: list[PromptLog] = []
        self.choices: list[ChoiceLog] = []
        """Of all prompts, in the order of the answer."""
        self.opened = asyncio.Event()
        """Set when all prompts were accepted or have rows, or one has failed."""
        self.finished = asyncio.Event()
        """Set when all choices have ended, or one has failed."""
        self.failure: ErrorInfo | None = None
        self.superseded = False
        """Another gateway serves it now: a stream closes without a terminal event."""
        self._latency = latency
        self._unopened = len(request.specs)
        self._unended = len(request.specs) * request.generated
        self._sender: _Sender | None = None

    # -- what the link reports ---------------------------------------------------------------------------------------

    def add_prompt(self, request: Request) -> None:
        """Take the hop's request for the next prompt. The ``context`` of each of its logs says where its rows go."""
        prompt = PromptLog(request, len(self.choices))
        request.context = (self, prompt)
        for choice in prompt.choices:
            choice.rows.context = (self, prompt, choice)
        self.prompts.append(prompt)
        self.choices += prompt.choices

    def on_accepted(self, prompt: PromptLog) -> None:
        """The engine took a prompt; repeated reports change nothing."""
        if not prompt.opened:
            prompt.opened = True
            self._unopened -= 1
            if not self._unopened:
                self.opened.set()

    def on_rows(self, prompt: PromptLog, choice: ChoiceLog, now: float) -> None:
        """A choice has got rows, perhaps its last one. ``now`` is monotonic."""
        self._latency.tokens(prompt, choice, now, self.arrived)
        if self._sender is not None:
            self._sender.mark(choice.index)
        if choice.rows.failed:
            self._fail_prompt(choice)
            return
        if choice.rows.end is not None and not choice.ended:
            choice.ended = True
            self._latency.choice_ended(choice)
            if prompt.request.over:
                self._prompt_ended(prompt, now)
            self._unended -= 1
            if not self._unended and self.failure is None:
                self.finished.set()
        self.on_accepted(prompt)

    def fail(self, error: ErrorInfo) -> None:
        """End the whole request with an error; the first one stands."""
        if not self.finished.is_set():
            self.failure = error
            self.opened.set()
            self.finished.set()

    def supersede(self) -> None:
        self.superseded = True
        self.fail(ErrorInfo(ErrorCode.LOST, "the request is served elsewhere"))

    def flush(self) -> None:
        """Write what is new to the stream, if there is one and its reader keeps up."""
        if self._sender is not None:
            self._sender.flush()

    # -- what the handler does ---------------------------------------------------------------------------------------

    async def stream_to(self, stream: EventStream) -> None:
        """Write events to an open stream until the request has ended and its last event is written.

        Raises:
            ConnectionResetError: the reader is gone or stalled, or another gateway serves it.
        """
        self._sender = _Sender(self, stream)
        try:
            await self._sender.run()
        finally:
            self._sender = None

    def answer(self) -> dict[str, Any]:
        """The whole answer of a request that was not streamed."""
        return completion(self.request, self.completion_id, self.created, self.prompts, self.usage())

    def usage(self) -> Usage:
        return Usage.of(self.prompts)

    def summary(self) -> dict[str, Any]:
        """How it went, for the log."""
        usage = self.usage()
        reasons = {choice.finish_reason or "hang-up" for choice in self.choices}
        summary = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish": "error" if self.failure else ",".join(sorted(reasons)),
            "seconds": round(time.monotonic() - self.arrived, 3),
        }
        return summary | ({"error": self.failure.message} if self.failure else {})

    def _prompt_ended(self, prompt: PromptLog, now: float) -> None:
        self._latency.request_ended(now - self.arrived)
        if self.request.shown.prompt and prompt.info is None:
            log.error("what was asked of a prompt did not come", completion=self.completion_id)
            self.fail(ErrorInfo(ErrorCode.INTERNAL, "the server had an error while processing the request"))

    def _fail_prompt(self, choice: ChoiceLog) -> None:
        error = choice.rows.end.error if choice.rows.end is not None else None
        if error is None:
            error = ErrorInfo(ErrorCode.INTERNAL, "the server had an error while processing the request")
        if len(self.prompts) > 1:
            error = dataclasses.replace(
                error, message=f"prompt[{choice.index // self.request.generated}]: {error.message}"
            )
        self.fail(error)


class _Sender:
    """Turns new rows of a generation into chunks, one write for each flush."""

    def __init__(self, generation: Generation, stream: EventStream) -> None:
        request = generation.request
        self._generation = generation
        self._stream = stream
        self._outputs = [
            ChoiceOutput(request, prompt, choice) for prompt in generation.prompts for choice in prompt.choices
        ]
        self._news = {choice.index for choice in generation.choices if choice.rows.rows}
        self._delivered = 0
        """Tokens that the client has."""
        self._begun: set[int] = set()
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
            parts.append(self._format.role(index, self._usage() if request.continuous_usage else None))
        self._delivered += len(ids)
        usage = self._usage() if request.continuous_usage else None
        wanted = text or logprobs is not None or (ids and (usage is not None or request.shown.token_ids))
        if wanted and (request.kind == "chat" or not ending):
            parts.append(self._format.text(index, text, ids, usage, logprobs))
            text, ids, logprobs = "", array("i"), None
        if ending:
            choice.end_sent = True
            reason = choice.finish_reason or "stop"
            parts.append(self._format.finish(index, reason, choice.stop_reason, text, ids, usage, logprobs))

    def _usage(self) -> Usage:
        """Of what the client has so far."""
        return dataclasses.replace(self._generation.usage(), completion_tokens=self._delivered)

    def _render_last(self, parts: list[bytes]) -> None:
        generation = self._generation
        if generation.failure is not None:
            parts.append(event(error_object_of(generation.failure)))
        elif generation.request.include_usage:
            parts.append(self._format.usage(generation.usage()))
        parts.append(DONE)
