"""One request while it grows: for ``for`` and for ``async for``."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from headrace.offline.errors import error_of
from headrace.offline.jobs import Job
from headrace.offline.render import assemble, best_choices, finished, positions
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.sampling_params import RequestOutputKind
from shared.hop import Log
from shared.messages import End, PromptInfo

if TYPE_CHECKING:
    from headrace.offline.session import Session


class _Piece(NamedTuple):
    """What one message brought for one choice."""

    choice: int
    ids: list[int]
    text: str
    records: list[bytes]
    end: End | None
    prompt: PromptInfo | None


_OVER = _Piece(-1, [], "", [], None, None)
"""The request is over."""


class _Feed:
    """The sink of one streamed job: pieces go in from the link's thread, outputs come out in the reader's."""

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        job.sink = self
        self.job = job
        self.pieces: deque[_Piece] = deque()
        self.ended = False
        """The last output was taken."""
        self._wake = wake
        scored = job.spec.params.logprobs is not None
        self._choices = [
            CompletionOutput(index, "", [], 0.0 if scored else None, [] if scored else None) for index in range(job.n)
        ]
        self._prompt: PromptInfo | None = None
        self._cached: int | None = None

    # -- what the link tells, in its thread --------------------------------------------------------------------------

    def grew(self, job: Job, log: Log, first: int) -> None:
        text = "".join(log.pieces[first:])
        if log.end is not None:
            text += log.last_piece
        ids = log.ids[first:].tolist()
        self.pieces.append(
            _Piece(log.choice, ids, text, log.records[first:], log.end, log.prompt if not first else None)
        )

    def over(self, job: Job) -> None:
        self.pieces.append(_OVER)

    def flush(self) -> None:
        if self.job.params.output_kind is not RequestOutputKind.FINAL_ONLY or self.job.over:
            self._wake()

    # -- what the reader does ----------------------------------------------------------------------------------------

    def take(self) -> RequestOutput | None:
        """All that has come since the last time as one output; None: nothing has.

        Raises:
            InvalidRequest, RequestFailed: the request has failed.
        """
        before = [(len(choice.token_ids), len(choice.text)) for choice in self._choices]
        touched = set()
        while self.pieces and not self.ended:
            piece = self.pieces.popleft()
            if piece is _OVER:
                self.ended = True
            else:
                touched.add(piece.choice)
                self._add(self._choices[piece.choice], piece)
        if self.ended:
            self._end()
        elif not touched:
            return None
        only_new = self.job.params.output_kind is RequestOutputKind.DELTA
        shown = [
            _shown(choice, *since, only_new=only_new)
            for choice, since in zip(self._choices, before, strict=True)
            if not only_new or choice.index in touched or self.ended
        ]
        if self.ended and not only_new:
            shown = best_choices(self.job, shown)
        output = assemble(self.job, shown, self._prompt, self._cached)
        output.finished = self.ended
        return output

    def _add(self, choice: CompletionOutput, piece: _Piece) -> None:
        if self.job.params.detokenize:
            choice.text += piece.text
        choice.token_ids += piece.ids
        if choice.logprobs is not None:
            new, total = positions(self.job, piece.records)
            choice.logprobs += new
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + total
        if piece.prompt is not None:
            self._prompt = piece.prompt
        if piece.end is not None:
            finished(choice, piece.end)
            self._cached = max(self._cached or 0, piece.end.cached_tokens)

    def _end(self) -> None:
        """The request is over; choices that were aborted have no END row among the pieces."""
        if self.job.error is not None:
            raise error_of(self.job.error, self.job.prompt.place)
        if self.job.request is not None:
            for choice, log in zip(self._choices, self.job.request.logs, strict=True):
                finished(choice, log.end)


def _shown(choice: CompletionOutput, tokens: int, chars: int, *, only_new: bool) -> CompletionOutput:
    """A copy for the reader; ``tokens`` and ``chars``: how much he has seen."""
    start, start_char = (tokens, chars) if only_new else (0, 0)
    return dataclasses.replace(
        choice,
        text=choice.text[start_char:],
        token_ids=choice.token_ids[start:],
        logprobs=None if choice.logprobs is None else choice.logprobs[start:],
        delta=choice.text[chars:],
    )


class SyncStream:
    """An iterator over the growing output of one request; ``close`` aborts it."""

    def __init__(self, owner: object, session: Session, job: Job) -> None:
        self._owner = owner  # it ends its processes when nobody holds it
        self._news: SimpleQueue[None] = SimpleQueue()
        self._feed = _Feed(job, lambda: self._news.put(None))
        self._session = session
        self._session.submit([job])

    @property
    def request_id(self) -> str:
        return self._feed.job.request_id

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> RequestOutput:
        """Waits for the next output. Raises as ``LLM.generate``, at the point of the failure."""
        while not self._feed.ended:
            self._news.get()
            try:
                while True:
                    self._news.get_nowait()
            except Empty:
                output = self._feed.take()
            if output is not None:
                return output
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is not over; the iterator ends."""
        if not self._feed.ended:
            self._feed.ended = True
            self._session.abort([self._feed.job])

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_session"):
            self.close()


class AsyncStream:
    """An asynchronous iterator over the growing output of one request; ``aclose``, or cancelling its reader, aborts it.

    Use it in one event loop.
    """

    def __init__(self, owner: object, session: Session, job: Job) -> None:
        self._owner = owner
        self._mailbox: Mailbox | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._feed = _Feed(job, self._post)
        self._session = session
        self._session.submit([job])

    @property
    def request_id(self) -> str:
        return self._feed.job.request_id

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> RequestOutput:
        loop = asyncio.get_running_loop()
        if self._mailbox is None:
            self._mailbox = self._session.mailbox(loop)
        try:
            while not self._feed.ended:
                self._waiter = loop.create_future()
                if self._may_take():
                    output = self._feed.take()
                    if output is not None:
                        return output
                if not self._feed.ended:
                    await self._waiter
        except asyncio.CancelledError:
            self._close()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request if it is not over; the iterator ends."""
        self._close()

    def wake(self) -> None:
        """Called by the mailbox, in the reader's loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _may_take(self) -> bool:
        final_only = self._feed.job.params.output_kind is RequestOutputKind.FINAL_ONLY
        return bool(self._feed.pieces) and (not final_only or self._feed.pieces[-1] is _OVER)

    def _post(self) -> None:
        if self._mailbox is not None:
            self._mailbox.post(self)

    def _close(self) -> None:
        if not self._feed.ended:
            self._feed.ended = True
            self._session.abort([self._feed.job])
            self.wake()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        if hasattr(self, "_session"):
            self._close()


class Mailbox:
    """Wakes the streams that are read in one event loop: once for all that have news, from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # the session knows mailboxes for as long as their loops live
        self._news: deque[AsyncStream] = deque()
        self._scheduled = False

    def post(self, stream: AsyncStream) -> None:
        """A stream has news. Called in the link's thread."""
        self._news.append(stream)
        if not self._scheduled:
            self._scheduled = True
            loop = self._loop()
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the reader's loop is closed
                self._news.clear()

    def _deliver(self) -> None:
        self._scheduled = False
        while self._news:
            self._news.popleft().wake()
