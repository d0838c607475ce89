"""Calls that are not requests: tokenize and detokenize. A lost answer is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from shared.errors import ErrorCode, RequestError
from shared.logging import get_logger
from shared.messages import Detokenize, Detokenized, ErrorInfo, Message, Tokenize, Tokenized
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.encoder import Encoder

_NONE = np.array([], np.int32)


class Calls:
    """Answers calls.

    Args:
        send: sends a message to a peer.
    """

    def __init__(self, encoder: Encoder, detokenizer: Detokenizer, send: Callable[[str, Message], bool]) -> None:
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._send = send
        self._running: set[asyncio.Task[None]] = set()
        self._log = get_logger()

    def receive(self, peer: str, message: Message) -> bool:
        """Begin to answer a call; False: it is not one."""
        match message:
            case Tokenize():
                answer: Awaitable[Message] = self._tokenize(message)
            case Detokenize():
                answer = self._detokenize(message)
            case _:
                return False
        task = asyncio.get_running_loop().create_task(self._answer(peer, answer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def _answer(self, peer: str, answer: Awaitable[Message]) -> None:
        self._send(peer, await answer)

    async def _tokenize(self, call: Tokenize) -> Tokenized:
        try:
            ids = await self._encoder.ids(call.spec)
            return Tokenized(call.call, ids, self._encoder.strings(ids) if call.want_strings else [])
        except Exception as error:
            return Tokenized(call.call, _NONE, [], self._info(error))

    async def _detokenize(self, call: Detokenize) -> Detokenized:
        try:
            ids = self._encoder.checked_ids(call.tokens, "tokens").tolist()
            loop = asyncio.get_running_loop()
            return Detokenized(call.call, await loop.run_in_executor(None, self._detokenizer.decode, ids))
        except Exception as error:
            return Detokenized(call.call, "", self._info(error))

    def _info(self, error: Exception) -> ErrorInfo:
        if isinstance(error, RequestError):
            return ErrorInfo(error.code, error.message, error.param)
        self._log.error("a call failed", exc_info=error)
        return ErrorInfo(ErrorCode.INTERNAL, "the tokenizer failed at this call; its log says why")
