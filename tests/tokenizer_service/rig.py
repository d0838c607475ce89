"""A tokenizer service with real sockets between an engine that follows a script and a gateway that collects text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import Settings
from shared.hop import ENGINE, Child, Growth, Log, Parent, Request, RunningClock, Timers
from shared.logprobs import pack_records
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Attempt,
    End,
    FinishReason,
    Hello,
    Load,
    Message,
    ModelCard,
    PromptInfo,
    TextSpec,
    TokenSpec,
)
from shared.sampling import SamplingParams
from shared.transport import Connector, Listener, Pump, Received, new_boot
from tokenizer_service.model import load_model
from tokenizer_service.service import TokenizerService

PROTOCOLS = OLDEST_PROTOCOL, PROTOCOL_VERSION
TIMERS = Timers(beat_s=0.2, lease_s=10)
EOS = End(FinishReason.STOP, cached_tokens=3)
LENGTH = End(FinishReason.LENGTH, cached_tokens=3)
Script = Callable[[Request], Sequence[Sequence[int]]]


def tick_often(loop_body: Callable[[], None]) -> asyncio.Task[None]:
    async def forever() -> None:
        while True:
            loop_body()
            await asyncio.sleep(0.01)

    return asyncio.get_running_loop().create_task(forever())


def record(token_id: int, top: Sequence[int] = ()) -> bytes:
    """A token record; the log-probabilities tell the ids."""
    ids = np.array([[token_id, *top]], np.int32)
    return pack_records(np.array([1], np.int32), ids, -ids.astype(np.float32))[0]


class ScriptedEngine:
    """Produces the ids of a script, one row of each choice per step, and ends with ``end``.

    Where records are wanted, each holds as many alternatives as were asked for: the ids that follow the token's.
    """

    def __init__(self, endpoint: str, card: ModelCard, script: Script, end: End = LENGTH) -> None:
        self.card, self.script, self.end, self.ready = card, script, end, True
        self.boot = new_boot()
        self.link = Listener(endpoint, boot=self.boot)
        self.child = Child(
            send=self.link.send,
            clock=RunningClock(time.monotonic),
            timers=TIMERS,
            events=self,
            role=ENGINE,
            recompute=False,
        )
        self.begun: list[TokenSpec] = []
        self.unwanted_logs: list[Log] = []
        self.dropped_ids: list[str] = []
        self.peers: dict[str, Hello] = {}
        self._active: dict[str, list[list[int]]] = {}
        self._pump = Pump(self.link, self.on_message)
        self._pump.start()
        self._task = tick_often(self.step)

    def on_message(self, received: Received) -> None:
        if isinstance(received.message, Hello):
            self.peers[received.peer] = received.message
            hello = Hello("engine", "e", *PROTOCOLS, self.ready, self.card, status="loading weights")
            self.link.send(received.peer, hello)
        else:
            assert self.child.receive(received.peer, received.boot, received.message)

    def step(self) -> None:
        self.child.tick()
        for rid, rows in list(self._active.items()):
            request = self.child.requests[rid]
            for log, ids in zip(request.logs, rows, strict=True):
                if log.end is None and len(log.ids) < len(ids) and request.spec.params.max_tokens != 0:
                    token_id, wanted = ids[len(log.ids)], request.spec.params.logprobs
                    records = [] if wanted is None else [record(token_id, range(token_id + 1, token_id + 1 + wanted))]
                    self.child.extend(log, [token_id], records)
                elif log.end is None:
                    self.child.finish(log, self.end)
        self.child.flush()

    def report(self, load: Load) -> None:
        for peer in self.peers:
            self.link.send(peer, load)

    def begin(self, request: Request) -> None:
        assert isinstance(request.spec, TokenSpec)
        self.begun.append(request.spec)
        self.child.accept(request, len(request.spec.prompt) // 4)
        self._active[request.rid] = [list(ids) for ids in self.script(request)]
        if request.spec.params.prompt_logprobs is not None:
            prompt = np.frombuffer(request.spec.prompt, np.int32).tolist()
            request.logs[0].prompt = PromptInfo([record(token_id) for token_id in prompt[1:]])

    def replaced(self, old: Log, new: Log) -> None:
        pass

    def resubmitted(self, request: Request) -> None:
        self.child.accept(request, request.prompt_tokens)

    def unwanted(self, log: Log) -> None:
        self.unwanted_logs.append(log)

    def rested(self, request: Request, resting: bool) -> None:
        pass

    def dropped(self, request: Request) -> None:
        self.dropped_ids.append(request.rid)
        self._active.pop(request.rid, None)

    def close(self) -> None:
        self._task.cancel()
        self._pump.stop()
        self.link.close()


class CollectingGateway:
    """Opens requests at one or more tokenizers and waits for their text."""

    def __init__(self, *endpoints: str) -> None:
        self.boot = new_boot()
        identity = f"gateway/{self.boot}"
        self.links = {each: Connector(each, identity=identity, boot=self.boot) for each in endpoints}
        self.link = self.links[endpoints[0]]
        self.parent = Parent(
            send=lambda name, message: self.links[name].send(message),
            clock=RunningClock(time.monotonic),
            timers=TIMERS,
            events=self,
            children=endpoints,
        )
        self.hello: Hello | None = None
        self.ready: set[str] = set()
        self.loads: list[Load] = []
        self.answers: list[Message] = []
        self.pieces: dict[str, list[tuple[int, str]]] = {}
        self._pumps = [Pump(link, self.on_message) for link in self.links.values()]
        for pump in self._pumps:
            pump.start()
        self._greeted = 0.0
        self._task = tick_often(self.step)

    def step(self) -> None:
        if time.monotonic() - self._greeted > 0.1:
            self._greeted = time.monotonic()
            for link in self.links.values():
                link.send(Hello("gateway", "g", *PROTOCOLS, True, None))
        self.parent.tick()
        self.parent.flush()

    def on_message(self, received: Received) -> None:
        message = received.message
        if self.parent.receive(received.peer, received.boot, message):
            return
        if isinstance(message, Hello):
            self.hello = message
            (self.ready.add if message.ready else self.ready.discard)(received.peer)
        elif isinstance(message, Load):
            self.loads.append(message)
        else:
            self.answers.append(message)

    def accepted(self, request: Request) -> None:
        pass

    def grew(self, growths: Sequence[Growth]) -> None:
        for log, first in growths:
            seen = self.pieces.setdefault(log.request.rid, [])
            seen += [(log.choice, piece) for piece in log.pieces[first:]]
            if log.end is not None:
                seen.append((log.choice, log.last_piece))

    def superseded(self, request: Request, live: Attempt) -> None:
        raise AssertionError("nobody else opened this request")

    async def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "it never came true"
            await asyncio.sleep(0.005)
        return value

    async def ask(self, rid: str, spec: TextSpec) -> list[Log]:
        """The logs of a request that has ended."""
        request = self.parent.open(rid, spec)
        await self.until(lambda: request.over)
        return request.logs

    def close(self) -> None:
        self._task.cancel()
        for pump in self._pumps:
            pump.stop()
        for link in self.links.values():
            link.close()


class Rig:
    def __init__(self, folder: Path, script: Script, end: End, settings: dict[str, Any]) -> None:
        self.settings = Settings(
            listen=f"ipc://{folder}/t", engine_endpoint=[f"ipc://{folder}/e"], beat_s=TIMERS.beat_s, **settings
        )
        self.model = load_model(self.settings)
        self.engine = ScriptedEngine(self.settings.engine_endpoint[0], self.model.card, script, end)
        self.service = TokenizerService(self.settings)
        self.gateway = CollectingGateway(self.service.endpoint)
        self._running = asyncio.get_running_loop().create_task(self.service.run())

    async def start(self) -> None:
        await self.gateway.until(lambda: self.gateway.hello is not None and self.gateway.hello.ready)

    async def close(self) -> None:
        self.gateway.close()
        self.service.stop()
        await self._running
        self.engine.close()


@contextlib.asynccontextmanager
async def rig(
    folder: Path, script: Script, *, end: End = LENGTH, ready: bool = True, **settings: Any
) -> AsyncIterator[Rig]:
    made = Rig(folder, script, end, settings)
    made.engine.ready = ready
    try:
        if ready:
            await made.start()
        yield made
    finally:
        await made.close()


def text_of(log: Log) -> str:
    return "".join(log.pieces) + log.last_piece


def spec(text: str | None = None, **options: Any) -> TextSpec:
    """A request; ``ids`` and ``chat`` instead of ``text``; everything else is a sampling parameter."""
    ids, chat = options.pop("ids", None), options.pop("chat", None)
    plain, echo = options.pop("add_special_tokens", True), options.pop("echo", False)
    resumable = options.pop("resumable", False)
    return TextSpec(
        SamplingParams(**{"max_tokens": 64} | options),
        text=text,
        ids=None if ids is None else np.array(ids, np.int32).tobytes(),
        chat=chat,
        add_special_tokens=plain,
        resumable=resumable,
        echo=echo,
    )
