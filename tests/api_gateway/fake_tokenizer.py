"""A tokenizer without a tokenizer: the real hop over a real socket, and rows made up by the words of the prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from shared.errors import ErrorCode
from shared.hop import TOKENIZER, Child, Log, Request, RunningClock, Timers
from shared.logprobs import pack_records, to_text_record
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Detokenize,
    Detokenized,
    End,
    ErrorInfo,
    FinishReason,
    Hello,
    Load,
    Message,
    ModelCard,
    PrefixCacheReset,
    PromptInfo,
    ResetPrefixCache,
    Tokenize,
    Tokenized,
)
from shared.transport import Listener, Pump, Received, new_boot

CARD = ModelCard("fake", "digest", 1000, 512)


@dataclasses.dataclass
class Token:
    """One row of a script."""

    id: int
    text: bytes | None
    """As in its record."""
    piece: str
    """What the row releases."""
    logprob: float = -0.5
    top: list[tuple[int, bytes | None, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Script:
    """What every choice of a request says."""

    tokens: list[Token]
    last_piece: str = ""
    end: End = dataclasses.field(default_factory=lambda: End(FinishReason.STOP))


class FakeTokenizer:
    """Prompt words: ``reject``, ``full`` are refused, ``silent`` is never accepted, ``hold`` is accepted and produces
    nothing, ``break`` fails after three tokens, ``burst`` gets all tokens in one message, ``huge`` gets tokens of 1000
    characters, ``held`` gets a text at every third token only, ``late`` starts its first choice after the others have
    ended, a word of ``scripts`` is answered with its script, everything else one token a step. Token k of choice c
    has the text ``c:k ``, the id k and the rank k % 3 + 1; the k most probable ids are 901, 902, ... in its place.

    A text prompt has five tokens, slices of its bytes; a prompt of ids has one token ``<id>`` for each."""

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
        self.scripts: dict[str, Script] = {}
        self.loads: dict[str, Load] = {}
        """What it reports of each process, with each sign of life."""
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
        self.child.accept(request, len(prompt_of(request)))
        for log in request.logs:
            self._restore(log)
        if "hold" not in words:
            wanted = request.spec.params.max_tokens
            wanted = 4 if wanted is None else wanted
            script = self._script(words)
            if script is not None:
                wanted = min(wanted, len(script.tokens))
            self._running.update({log: wanted for log in request.logs if log.end is None})

    def _script(self, words: list[str]) -> Script | None:
        return next((self.scripts[word] for word in words if word in self.scripts), None)

    def replaced(self, old: Log, new: Log) -> None:
        self._restore(new)
        wanted = self._running.pop(old, None)
        if new.end is None and (wanted is not None or old.end is not None):
            self._running[new] = wanted or len(old.ids)

    def _restore(self, log: Log) -> None:
        """The texts of ids that it was given."""
        log.pieces = [f"{log.choice}:{number} " for number in range(len(log.ids))]
        info = info_of(log.request)
        if info is not None and (info.text or log.choice == 0):
            log.prompt = info if log.choice == 0 else dataclasses.replace(info, records=[])

    def resubmitted(self, request: Request) -> None:
        self.child.accept(request, len(prompt_of(request)))

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
                self._step(log, wanted)
            self.child.tick()
            self.child.flush()

    def _step(self, log: Log, wanted: int) -> None:
        words = words_of(log.request)
        if "late" in words and log.choice == 0 and any(other.end is None for other in log.request.logs[1:]):
            return
        script = self._script(words)
        for _ in range(wanted if "burst" in words else min(1, wanted)):
            self._produce(log, words, script)
        if len(log.ids) >= wanted:
            self._running.pop(log)
            self._finish(log, words, script if script is not None and wanted == len(script.tokens) else None)
        elif "break" in words and len(log.ids) == 3:
            self.child.fail(log.request, ErrorInfo(ErrorCode.INTERNAL, "the engine broke"))
            self._running.pop(log)

    def _finish(self, log: Log, words: list[str], script: Script | None) -> None:
        stop = log.request.spec.params.stop
        end = End(FinishReason.STOP if stop else FinishReason.LENGTH, stop[0] if stop else None)
        if script is not None:
            end = script.end
        self.child.finish(log, dataclasses.replace(end, cached_tokens=2))
        log.last_piece = script.last_piece if script is not None else "last" if "held" in words else ""

    def _produce(self, log: Log, words: list[str], script: Script | None) -> None:
        number = len(log.ids)
        piece = "x" * 1000 if "huge" in words else f"{log.choice}:{number} "
        token = script.tokens[number] if script is not None else ranked(number, piece, log.choice)
        held = script is None and "held" in words and number % 3 != 2
        log.pieces.append("" if held else token.piece)
        top = log.request.spec.params.logprobs
        self.child.extend(log, (token.id,), () if top is None else (record_of(token, top),))

    def report(self, load: Load) -> None:
        """At once, and from now on."""
        self.loads[load.source] = load
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
        if isinstance(received.message, Hello):
            for load in self.loads.values():
                self._listener.send(received.peer, load)

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
            case ResetPrefixCache():
                return PrefixCacheReset(message.call, num_forgotten=3, num_held=1)
        return None

    def _hello(self) -> Hello:
        status = "" if self.ready else "loading weights"
        protocols = OLDEST_PROTOCOL, PROTOCOL_VERSION
        return Hello("tokenizer_service", "fake", *protocols, self.ready, self.card, self.refusal, status)


def words_of(request: Request) -> list[str]:
    spec: Any = request.spec
    if spec.text is not None:
        return str(spec.text).split()
    if spec.chat is not None:
        return str(orjson.loads(spec.chat)["messages"][-1]["content"]).split()
    return []


def prompt_of(request: Request) -> list[Token]:
    """The tokens of a prompt."""
    spec: Any = request.spec
    if spec.ids is not None:
        return [ranked(int(i), f"<{i}>", 0) for i in np.frombuffer(spec.ids, np.int32)]
    data = " ".join(words_of(request)).encode() if spec.text is None else spec.text.encode()
    size = -(-len(data) // 5)
    return [
        dataclasses.replace(ranked(number, "", 0), text=data[number * size : (number + 1) * size])
        for number in range(5)
    ]


def info_of(request: Request) -> PromptInfo | None:
    """What the request asks of its prompt."""
    spec: Any = request.spec
    top = spec.params.prompt_logprobs
    if top is None and not spec.echo:
        return None
    tokens = prompt_of(request)
    return PromptInfo(
        records=[] if top is None else [record_of(token, top) for token in tokens[1:]],
        ids=np.array([token.id for token in tokens], np.int32).tobytes(),
        text=b"".join(token.text or b"" for token in tokens).decode() if spec.echo else "",
        first=tokens[0].text or b"",
    )


def ranked(number: int, text: str, choice: int) -> Token:
    """Token ``number`` of a choice: its rank is number % 3 + 1. All tokens of choices 0, 1, 2, 3 are less probable by
    0, 3, 6, 2 eighths."""
    rank = number % 3 + 1
    worse = (choice * 3 % 7) / 8
    top = [(901 + place, b"t%d" % (901 + place), -(place + 1) / 2 - worse) for place in range(20)]
    token = (number, text.encode(), -rank / 2 - worse)
    top[rank - 1] = token
    return Token(*token[:2], text, token[2], top)


def record_of(token: Token, top: int) -> bytes:
    """The text record of a token with its ``top`` most probable ones."""
    others = (token.top + [(999, None, float("-inf"))] * 20)[:top]
    entries = [(token.id, token.text, token.logprob), *others]
    ranks = [place for place, other in enumerate(token.top, start=1) if other[0] == token.id]
    ids, texts, logprobs = zip(*entries, strict=True)
    (record,) = pack_records(
        np.array(ranks[:1] or [50], np.int32), np.array([ids], np.int32), np.array([logprobs], np.float32)
    )
    return to_text_record(record, list(texts))


async def until(condition: Callable[[], Any], limit_s: float = 30.0) -> None:
    """Wait until ``condition()`` is true; fails after ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.005)
