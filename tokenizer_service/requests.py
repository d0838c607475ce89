"""What a tokenizer does for each request: the prompt's ids on the way down, text on the way up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from shared.errors import ErrorCode, RequestError
from shared.hop import Growth, Log, Relay, Request
from shared.logging import get_logger
from shared.messages import End, ErrorInfo, FinishReason, TextSpec, TokenSpec
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.encoder import Encoder, Prompt
from tokenizer_service.logprob_text import LogprobText, PromptText
from tokenizer_service.text_stream import TextStream

PROMPT_TAIL = 8
"""Last ids of the prompt that a decoder may look at."""

_INTERNAL = ErrorInfo(ErrorCode.INTERNAL, "the tokenizer failed at this request; its log says why")


@dataclasses.dataclass(slots=True)
class Counts:
    """Since the process began."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0


@dataclasses.dataclass(slots=True)
class Progress:
    """``Request.context``: what is known of a request beyond its logs."""

    encoding: asyncio.Task[None]
    spec: TokenSpec | None = None
    """None until the prompt is encoded."""
    tail: list[int] = dataclasses.field(default_factory=list)
    """The last ids of the prompt."""
    prompt: PromptText | None = None
    """None: nothing is told of the prompt."""


class Requests:
    """Hears what happens to the requests of a relay (``shared.hop.RelayEvents``). Set ``relay`` before any does.

    A failure inside one request ends that request with an error, and is logged with its id.
    """

    relay: Relay

    def __init__(
        self, encoder: Encoder, detokenizer: Detokenizer, logprob_text: LogprobText, eos_ids: Sequence[int]
    ) -> None:
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._logprob_text = logprob_text
        self._eos_ids = frozenset(eos_ids)
        self._log = get_logger()
        self.counts = Counts()
        self.encoding = 0
        """Requests whose prompt is being encoded."""

    def begin(self, request: Request) -> None:
        self.counts.requests += 1
        request.context = Progress(asyncio.get_running_loop().create_task(self._encode(request, time.monotonic())))

    def replaced(self, log: Log) -> None:
        progress: Progress | None = log.request.context
        if progress is not None and progress.spec is not None:
            self._open(log, progress)
            self._write_or_fail(log, 0)

    def dropped(self, request: Request) -> None:
        progress: Progress | None = request.context
        if progress is not None:
            progress.encoding.cancel()

    def grew(self, growths: Sequence[Growth]) -> None:
        for log, first in growths:
            self.counts.output_tokens += len(log.ids) - first
            self._write_or_fail(log, first)

    # -- down --------------------------------------------------------------------------------------------------------

    async def _encode(self, request: Request, arrived: float) -> None:
        spec = request.spec
        assert isinstance(spec, TextSpec)
        self.encoding += 1
        try:
            prompt = await self._encoder.prompt(spec)
            params = await self._encoder.params(spec, len(prompt.ids))
            left = None if spec.deadline_s is None else spec.deadline_s - (time.monotonic() - arrived)
            progress: Progress = request.context
            progress.spec = TokenSpec(
                params, prompt.ids.tobytes(), spec.priority, spec.cache_salt, spec.resumable, left, spec.tenant
            )
            progress.tail = prompt.ids[-PROMPT_TAIL:].tolist()
            progress.prompt = self._told_of(prompt, spec)
            for log in request.logs:
                self._open(log, progress)
                self._write(log, 0)
            # What the engine will say when it accepts; that may be lost on its way, and a stop string end the request.
            request.prompt_tokens = len(prompt.ids)
            self.counts.prompt_tokens += len(prompt.ids)
            self.relay.start(request, progress.spec)
        except RequestError as error:
            self.counts.refused += 1
            self._log.info("refused", request_id=request.rid, reason=error.message)
            self.relay.fail(request, ErrorInfo(error.code, error.message, error.param))
        except Exception:
            self._log.exception("cannot encode", request_id=request.rid)
            self.relay.fail(request, _INTERNAL)
        finally:
            self.encoding -= 1
        self.relay.flush()

    def _told_of(self, prompt: Prompt, spec: TextSpec) -> PromptText | None:
        scored = spec.params.prompt_logprobs is not None
        if not (scored or spec.echo):
            return None
        text = prompt.text
        if text is None:
            text = self._detokenizer.decode(prompt.ids.tolist()) if spec.echo else ""
        return self._logprob_text.prompt(prompt.ids, text, echo=spec.echo, scored=scored)

    # -- up ----------------------------------------------------------------------------------------------------------

    def _open(self, log: Log, progress: Progress) -> None:
        """Give a log a new decoder, and what its first row is to tell of the prompt."""
        assert progress.spec is not None
        told = progress.prompt
        if told is not None and (told.echo or log.choice == 0):
            log.prompt = told.info
        log.context = TextStream(self._detokenizer, progress.tail, progress.spec.params, self._eos_ids)
        log.pieces = []

    def _write_or_fail(self, log: Log, first: int) -> None:
        try:
            self._write(log, first)
        except Exception:
            self._log.exception("cannot decode", request_id=log.request.rid)
            self.relay.fail(log.request, _INTERNAL)

    def _write(self, log: Log, first: int) -> None:
        """Make the text of the rows from ``first`` on and of their records, and end the log at a stop string."""
        stream: TextStream = log.context
        ids, pieces, records = log.ids, log.pieces, log.records
        if first == 0:
            self._tell_prompt(log)
        for offset in range(first, len(ids)):
            pieces.append(stream.push(ids[offset]))
            if records and records[offset]:
                records[offset] = self._logprob_text.record(records[offset], stream.own(ids[offset]))
            if stream.stop is not None:
                self._end(log, offset + 1, stream.stop, "")
                break
        else:
            if log.end is not None:
                log.last_piece = stream.finish()
                if stream.stop is not None and not log.failed:
                    self._end(log, len(ids), stream.stop, log.last_piece)

    def _tell_prompt(self, log: Log) -> None:
        """Complete what an engine has told of the prompt: it knows only the records."""
        progress: Progress = log.request.context
        told = progress.prompt
        if told is not None and log.prompt is not None and log.prompt is not told.info:
            log.prompt = self._logprob_text.scored(told, log.prompt.records)

    def _end(self, log: Log, tokens: int, stop: str, last_piece: str) -> None:
        log.cut(tokens, End(FinishReason.STOP, stop_reason=stop), last_piece)
        self.relay.child.mark(log)
