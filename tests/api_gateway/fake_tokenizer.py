"""A tokenizer without a tokenizer: the real hop over a real socket, and rows made up by the words of the prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from shared.errors import ErrorCode
from shared.hop import TOKENIZER, Child, Log, Request, RunningClock, Timers
from shared.messages import (
    Detokenize,
    Detokenized,
    End,
    ErrorInfo,
    FinishReason,
    Hello,
    Load,
    Message,
    ModelCard,
    Tokenize,
    Tokenized,
)
from shared.transport import Listener, Pump, Received, new_boot

CARD = ModelCard("fake", "digest", 1000, 512)


class FakeTokenizer:
    """Prompt words: ``reject``, ``full`` are refused, ``silent`` is never accepted, ``hold`` is accepted and produces
    nothing, ``break`` fails after three tokens, ``burst`` gets all tokens in one message, ``huge`` gets tokens of 1000
    characters, ``held`` gets a text at every third token only, everything else one token a step. Token k of choice c
    has the text ``c:k `` and the id k."""

    def __init__(self, endpoint: str, *, beat_s: float = 0.2, step_s: float = 0.002, card: ModelCard = CARD) -> None:
        self.endpoint = endpoint
        self.card = card
        self.ready = True
        self.step_s = step_s
        self.requests: list[Request] = []
        self.ended: list[Request] = []
        """Those that were aborted, or acknowledged to their end."""
        self.calls: list[Any] = []
        self.hellos: list[Hello] = []
        self.refusal: str | None = None
        self._gateways: set[str] = set()
        self._running: dict[Log, int] = {}
        self._boot = new_boot()
        self._beat_s = beat_s
        self._listener = Listener(endpoint, boot=self._boot)
        self._pump = Pump(self._listener, self._on_message)
        self.child = Child(
            send=self._listener.send,
            clock=RunningClock(time.monotonic),
            timers=Timers(beat_s, 20 * beat_s),
            events=self,
            role=TOKENIZER,
            recompute=True,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._pump.start()
        self._tasks = [asyncio.create_task(self._steps())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pump.stop()
        self._listener.close()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def logs(self) -> list[Log]:
        """Those that get rows."""
        return list(self._running)

    # -- child events ------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        self.requests.append(request)
        words = words_of(request)
        if "reject" in words:
            error = ErrorInfo(ErrorCode.INVALID_REQUEST, "max_tokens 600 + prompt 5 > max_model_len 512", "max_tokens")
            self.child.fail(request, error)
            return
        if "full" in words:
            self.child.fail(request, ErrorInfo(ErrorCode.OVERLOADED, "4096 requests are waiting"))
            return
        if "silent" in words:
            return
        self.child.accept(request, 5)
        for log in request.logs:
            self._restore(log)
        if "hold" not in words:
            wanted = request.spec.params.max_tokens or 4
            self._running.update({log: wanted for log in request.logs if log.end is None})

    def replaced(self, old: Log, new: Log) -> None:
        self._restore(new)
        wanted = self._running.pop(old, None)
        if wanted is not None and new.end is None:
            self._running[new] = wanted

    def _restore(self, log: Log) -> None:
        """The texts of ids that it was given."""
        log.pieces = [f"{log.choice}:{number} " for number in range(len(log.ids))]

    def resubmitted(self, request: Request) -> None:
        self.child.accept(request, 5)

    def unwanted(self, log: Log) -> None:
        self._running.pop(log, None)

    def rested(self, request: Request, resting: bool) -> None: ...

    def dropped(self, request: Request) -> None:
        self.ended.append(request)
        for log in request.logs:
            self._running.pop(log, None)

    # -- work --------------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            for log, wanted in list(self._running.items()):
                words = words_of(log.request)
                for _ in range(wanted if "burst" in words else 1):
                    self._produce(log, words)
                if len(log.ids) >= wanted:
                    self._running.pop(log)
                    stop = log.request.spec.params.stop
                    reason = FinishReason.STOP if stop else FinishReason.LENGTH
                    self.child.finish(log, End(reason, stop[0] if stop else None, cached_tokens=2))
                    log.last_piece = "last" if "held" in words else ""
                elif "break" in words and len(log.ids) == 3:
                    self.child.fail(log.request, ErrorInfo(ErrorCode.INTERNAL, "the engine broke"))
                    self._running.pop(log)
            self.child.tick()
            self.child.flush()

    def _produce(self, log: Log, words: list[str]) -> None:
        number = len(log.ids)
        piece = "x" * 1000 if "huge" in words else f"{log.choice}:{number} "
        log.pieces.append("" if "held" in words and number % 3 != 2 else piece)
        self.child.append(log, number)

    def report(self, load: Load) -> None:
        for gateway in self._gateways:
            self._listener.send(gateway, load)

    def _on_message(self, received: Received) -> None:
        self._gateways.add(received.peer)
        if self.child.receive(received.peer, received.boot, received.message):
            self.child.flush()
            return
        reply = self._reply(received.message)
        if reply is not None:
            self._listener.send(received.peer, reply)

    def _reply(self, message: Message) -> Message | None:
        match message:
            case Hello():
                self.hellos.append(message)
                return self._hello()
            case Tokenize():
                self.calls.append(message)
                if message.spec.text == "reject":
                    return Tokenized(message.call, np.zeros(0, np.int32), [], ErrorInfo(1, "not that", "prompt"))
                if message.spec.text == "lose" and len(self.calls) == 1:
                    return None
                strings = ["a", "b", "c"] if message.want_strings else []
                return Tokenized(message.call, np.array([1, 2, 3], np.int32), strings)
            case Detokenize():
                return Detokenized(message.call, " ".join(map(str, message.tokens.tolist())))
        return None

    def _hello(self) -> Hello:
        status = "" if self.ready else "loading weights"
        return Hello("tokenizer_service", "fake", 1, 1, self.ready, self.card, self.refusal, status)


def words_of(request: Request) -> list[str]:
    spec: Any = request.spec
    if spec.text is not None:
        return str(spec.text).split()
    if spec.chat is not None:
        return str(orjson.loads(spec.chat)["messages"][-1]["content"]).split()
    return []


async def until(condition: Callable[[], Any], limit_s: float = 5.0) -> None:
    """Wait until ``condition()`` is true; fails after ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.005)
