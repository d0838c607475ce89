"""One HTTP request for text while it is served: its logs, and the stream that its rows are written to."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from api_gateway.chunk_sender import ChunkSender
from api_gateway.errors import out_of_time
from api_gateway.event_stream import EventStream
from api_gateway.latency import Latency
from api_gateway.request_log import ChoiceLog, Position, PromptLog, Usage
from api_gateway.responses import completion
from api_gateway.resume import Resumption
from api_gateway.schemas import GenerationRequest
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
        resumption: of a request that its client may come back for.
    """

    def __init__(
        self,
        request: GenerationRequest,
        completion_id: str,
        latency: Latency,
        resumption: Resumption | None = None,
    ) -> None:
        self.request = request
        self.completion_id = completion_id
        self.resumption = resumption
        self.place = None if resumption is None else resumption.place
        """What the client of a resumed stream has."""
        self.created = int(time.time()) if self.place is None else self.place.created
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
        self._sender: ChunkSender | None = None

    # -- what the link reports ---------------------------------------------------------------------------------------

    def add_prompt(self, request: Request) -> None:
        """Take the hop's request for the next prompt. The ``context`` of each of its logs says where its rows go."""
        prompt = PromptLog(request, len(self.choices))
        request.context = (self, prompt)
        for choice in prompt.choices:
            choice.rows.context = (self, prompt, choice)
        if self.resumption is not None:
            positions, lengths = self.position_of(len(self.prompts))
            prompt.resume(positions, lengths, self.arrived)
        self.prompts.append(prompt)
        self.choices += prompt.choices

    def position_of(self, prompt: int) -> tuple[list[Position], tuple[int, int]]:
        """What the client has of a prompt's choices; the length of the prompt, and of its cached part, as it knows."""
        count, place = self.request.generated, self.place
        if place is None:
            return [Position()] * count, (0, 0)
        return place.positions[prompt * count : (prompt + 1) * count], place.prompts[prompt]

    def begin(self) -> None:
        """Take up what is known of the prompts already: another connection had them, or all their choices ended."""
        now = time.monotonic()
        for prompt in self.prompts:
            if prompt.request.lower is not None and prompt.request.lower.accepted:
                self.on_accepted(prompt)
            for choice in prompt.choices:
                if choice.rows.rows:
                    self.on_rows(prompt, choice, now)

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
        if choice.lost:
            self.fail(ErrorInfo(ErrorCode.LOST, "the output can no longer be continued; start it again"))
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

    @property
    def returns(self) -> bool:
        """Its client may come back, here or elsewhere, for what has not ended yet."""
        if self.resumption is None or self.failure is None:
            return self.resumption is not None
        return self.superseded or self.failure.code == ErrorCode.UNAVAILABLE

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
        self._sender = ChunkSender(self, stream)
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
        if prompt.request.lower is None:
            return  # the client had all of it
        self._latency.request_ended(now - self.arrived)
        if self.request.shown.prompt and prompt.info is None:
            log.error("what was asked of a prompt did not come", completion=self.completion_id)
            self.fail(ErrorInfo(ErrorCode.INTERNAL, "the server had an error while processing the request"))

    def _fail_prompt(self, choice: ChoiceLog) -> None:
        error = choice.rows.end.error if choice.rows.end is not None else None
        if error is None:
            error = ErrorInfo(ErrorCode.INTERNAL, "the server had an error while processing the request")
        if error.code == ErrorCode.TIMEOUT and self.request.timeout_s is not None:
            error = out_of_time(self.request.timeout_s)
        elif len(self.prompts) > 1:
            error = dataclasses.replace(
                error, message=f"prompt[{choice.index // self.request.generated}]: {error.message}"
            )
        self.fail(error)
