"""Questions to a tokenizer that are not requests: asked again until one answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shared.errors import ErrorCode, RequestError
from shared.messages import (
    Detokenize,
    Detokenized,
    Int32,
    Message,
    PrefixCacheReset,
    ResetPrefixCache,
    TextSpec,
    Tokenize,
    Tokenized,
)

GIVE_UP_S = 30.0

Question: TypeAlias = Tokenize | Detokenize | ResetPrefixCache
Answer: TypeAlias = Tokenized | Detokenized | PrefixCacheReset
ANSWERS: dict[type[Question], type[Answer]] = {
    Tokenize: Tokenized,
    Detokenize: Detokenized,
    ResetPrefixCache: PrefixCacheReset,
}


@dataclasses.dataclass(slots=True)
class _Call:
    message: Question
    answer: asyncio.Future[Answer]
    asked: str = ""
    asked_at: float = 0.0
    times: int = 0


class Calls:
    """Open questions.

    Args:
        send: sends a message to a tokenizer by name; False when it cannot go out now.
        names: the tokenizers that are ready.
        beat_s: after two beats without an answer the question is asked again, of the next one.
    """

    def __init__(self, send: Callable[[str, Message], bool], names: Callable[[], Sequence[str]], beat_s: float) -> None:
        self._send = send
        self._names = names
        self._again_s = 2 * beat_s
        self._numbers = itertools.count(1)
        self._open: dict[int, _Call] = {}

    async def tokenize(self, spec: TextSpec, want_strings: bool) -> Tokenized:
        """The ids of a text or a chat.

        Raises:
            RequestError: as the tokenizer says, or 503 when none answers.
        """
        answer = await self._ask(Tokenize(next(self._numbers), spec, want_strings))
        assert isinstance(answer, Tokenized)
        return answer

    async def detokenize(self, tokens: Int32) -> Detokenized:
        """The text of ids. Raises as ``tokenize``."""
        answer = await self._ask(Detokenize(next(self._numbers), tokens))
        assert isinstance(answer, Detokenized)
        return answer

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """Have every engine forget its cached prefixes. Raises as ``tokenize``."""
        answer = await self._ask(ResetPrefixCache(next(self._numbers)))
        assert isinstance(answer, PrefixCacheReset)
        return answer

    async def _ask(self, message: Question) -> Answer:
        call = _Call(message, asyncio.get_running_loop().create_future())
        self._open[message.call] = call
        try:
            self._put(call)
            async with asyncio.timeout(GIVE_UP_S):
                answer = await call.answer
        except TimeoutError:
            asked = "engine" if isinstance(message, ResetPrefixCache) else "tokenizer"
            raise RequestError(f"no {asked} has answered", code=ErrorCode.UNAVAILABLE) from None
        finally:
            del self._open[message.call]
        if answer.error is not None:
            code = ErrorCode(answer.error.code)
            raise RequestError(answer.error.message, answer.error.param, code)
        return answer

    def on_answer(self, answer: Answer) -> None:
        call = self._open.get(answer.call)
        if call is not None and type(answer) is ANSWERS[type(call.message)] and not call.answer.done():
            call.answer.set_result(answer)

    def tick(self) -> None:
        """Ask again what has waited too long. Call it several times a beat."""
        now = time.monotonic()
        for call in self._open.values():
            if now - call.asked_at >= self._again_s:
                self._put(call)

    def lost(self, name: str) -> None:
        """A tokenizer is gone: ask another what it has not answered."""
        for call in self._open.values():
            if call.asked == name:
                call.asked_at = 0.0
                self._put(call)

    def _put(self, call: _Call) -> None:
        names = self._names()
        name = names[call.times % len(names)] if names else ""
        if names and self._send(name, call.message):
            call.asked, call.asked_at = name, time.monotonic()
            call.times += 1
