"""The links to the tokenizers: who there is, which are ready, and the requests that they serve for us."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from api_gateway.calls import Calls
from api_gateway.generation import Generation
from api_gateway.request_log import Position
from shared.config import Settings
from shared.errors import ErrorCode, StartupError
from shared.hop import Log, Parent, Request, RunningClock, Timers
from shared.links import DEFAULT_TOKENIZER_ENDPOINT, curve_keys_of, process_name, speaks_our_protocol
from shared.logging import get_logger
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Attempt,
    Detokenized,
    ErrorInfo,
    Hello,
    Load,
    Message,
    ModelCard,
    PrefixCacheReset,
    TextSpec,
    Tokenized,
)
from shared.transport import Connector, Pump, Received, new_boot, resolve

RESOLVE_S = 5.0
SILENT_BEATS = 5
"""A tokenizer that says nothing for so many beats is not ready."""
LOST_S = 60.0
"""When no tokenizer says anything for this long, running requests end with an error."""
FORGET_LOAD_S = 300.0

log = get_logger()


class _Peer:
    """One tokenizer as this gateway sees it."""

    def __init__(self, connector: Connector, on_message: Callable[[Received], None]) -> None:
        self.connector = connector
        self.pump = Pump(connector, on_message)
        self.hello: Hello | None = None
        self.heard_at: float | None = None
        self.complaint: str | None = None
        """Why we do not work with it."""

    def close(self) -> None:
        self.pump.stop()
        self.connector.close()


class TokenizerLinks:
    """All tokenizers behind this gateway. Made and used in the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._endpoints = settings.tokenizer_endpoint or [DEFAULT_TOKENIZER_ENDPOINT]
        self._curve = curve_keys_of(settings)
        self._boot = new_boot()
        self._name = process_name(settings)
        self._identity = f"gateway/{self._boot:x}"
        self._clock = RunningClock(time.monotonic)
        self._peers: dict[str, _Peer] = {}
        self._loads: dict[str, tuple[Load, float]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._hello_at = 0.0
        self._heard_at = self._clock()
        self.card: ModelCard | None = None
        """Of the model that the tokenizers serve, as last heard."""
        self._timers = Timers(settings.beat_s, settings.lease_s)
        self.parent = Parent(send=self._send, clock=self._clock, timers=self._timers, events=self)
        self.calls = Calls(self._send, self._ready_names, settings.beat_s)

    async def start(self) -> None:
        """Connect, and keep connected.

        Raises:
            StartupError: an endpoint cannot be used.
        """
        self._connect(await asyncio.to_thread(resolve, self._endpoints))
        self._tasks = [asyncio.create_task(self._keep_time()), asyncio.create_task(self._keep_resolved())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    # -- what the routes ask for -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, generation: Generation, request_id: str) -> Iterator[None]:
        """Have the prompts of ``generation`` served. What has not ended at the exit is aborted, unless its client may
        come back for it."""
        resumption = generation.resumption
        unique = secrets.token_hex(6) if resumption is None else resumption.key.hex()
        try:
            for number, spec in enumerate(generation.request.specs):
                rid = f"{request_id}-{unique}-{number}"
                positions, _ = generation.position_of(number)
                generation.add_prompt(self._open(rid, spec, positions))
            generation.begin()
            yield
        finally:
            for prompt in generation.prompts:
                if prompt.request.context[0] is generation:
                    self.parent.close(prompt.request, keep=generation.returns)
            self.parent.flush()

    def _open(self, rid: str, spec: TextSpec, positions: Sequence[Position]) -> Request:
        """A request of the hop, new or as far as its client has it. A choice whose end it has is asked for, too: its
        log stays whole, and usage counts it; but nothing is asked for when all have ended."""
        if all(position.ended for position in positions):
            return self.parent.open(rid, spec, ended=range(len(positions)))
        known = [position.known for position in positions]
        live = self.parent.requests.get(rid)
        if live is not None:
            earlier, _ = live.context
            found = self.parent.find(rid, known)
            earlier.supersede()
            earlier.flush()
            if found is not None:
                return found
        return self.parent.open(rid, spec, known)

    def not_ready(self) -> str | None:
        """Why no tokenizer would take a request now, in words; None: one would."""
        if not self._peers:
            return f"no tokenizer is found at {', '.join(self._endpoints)}"
        if any(self._is_ready(peer) for peer in self._peers.values()):
            return None
        for peer in self._peers.values():
            if peer.complaint is not None:
                return peer.complaint
            if peer.hello is not None and self._is_fresh(peer):
                return peer.hello.refusal or peer.hello.status or "the tokenizer is not ready"
        return f"waiting for a tokenizer at {', '.join(self._peers)}"

    def loads(self) -> Iterator[tuple[Load, bool]]:
        """The latest report of each process, and whether it is fresh."""
        now = self._clock()
        for load, heard_at in self._loads.values():
            yield load, now - heard_at <= SILENT_BEATS * self._settings.beat_s

    # -- what the hop reports ----------------------------------------------------------------------------------------

    def accepted(self, request: Request) -> None:
        generation, prompt = request.context
        generation.on_accepted(prompt)

    def grew(self, growths: Sequence[tuple[Log, int]]) -> None:
        """All rows of one message: each stream gets one write."""
        now = time.monotonic()
        touched: dict[Generation, None] = {}
        for rows, _ in growths:
            generation, prompt, choice = rows.context
            generation.on_rows(prompt, choice, now)
            touched[generation] = None
        for generation in touched:
            try:
                generation.flush()
            except Exception:
                log.exception("a stream could not be written", completion=generation.completion_id)
                generation.fail(ErrorInfo(ErrorCode.INTERNAL, "the server had an error while processing the request"))

    def superseded(self, request: Request, live: Attempt) -> None:
        generation, _ = request.context
        generation.supersede()
        generation.flush()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, name: str, message: Message) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.connector.send(message)

    def _on_message(self, received: Received) -> None:
        peer = self._peers.get(received.peer)
        if peer is None:
            return
        peer.heard_at = self._heard_at = self._clock()
        self.parent.receive(received.peer, received.boot, received.message)
        match received.message:
            case Hello() as hello:
                self._on_hello(received.peer, peer, hello)
            case Load() as load:
                self._loads[load.source] = (load, self._clock())
            case Tokenized() | Detokenized() | PrefixCacheReset() as answer:
                self.calls.on_answer(answer)
        self.parent.flush()

    def _on_hello(self, name: str, peer: _Peer, hello: Hello) -> None:
        peer.hello = hello
        others = [p.hello.card for p in self._peers.values() if p is not peer and p.hello and self._is_ready(p)]
        complaint = _complaint(hello, next((card for card in others if card is not None), None))
        if complaint is not None and complaint != peer.complaint:
            log.error("refusing a tokenizer", tokenizer=hello.name, endpoint=name, reason=complaint)
        peer.complaint = complaint
        ready = self._is_ready(peer)
        if ready and hello.card is not None and hello.card != self.card:
            log.info("model", card=hello.card)
            self.card = hello.card
        self.parent.set_usable(name, ready)

    def _is_fresh(self, peer: _Peer) -> bool:
        return peer.heard_at is not None and self._clock() - peer.heard_at <= SILENT_BEATS * self._settings.beat_s

    def _is_ready(self, peer: _Peer) -> bool:
        hello = peer.hello
        if hello is None or peer.complaint is not None or hello.refusal is not None:
            return False
        return hello.ready and hello.card is not None and self._is_fresh(peer)

    def _ready_names(self) -> list[str]:
        return [name for name, peer in self._peers.items() if peer.connector.connected and self._is_ready(peer)]

    # -- connections -------------------------------------------------------------------------------------------------

    def _on_connection(self, name: str, connected: bool) -> None:
        """A tokenizer that was killed closes its connection, and one that was started says who it is when asked."""
        peer = self._peers[name]
        if connected:
            peer.connector.send(self._hello(peer.complaint))
            self.parent.reached(name)
            self.parent.flush()
        else:
            asyncio.get_running_loop().call_later(self._timers.blip_s, self._after_blip, name)

    def _after_blip(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None and not peer.connector.connected:
            log.warning("lost the connection to a tokenizer", endpoint=name)
            self.parent.lost(name)
            self.calls.lost(name)
            self.parent.flush()

    # -- time --------------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(self._settings.beat_s / 4)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._hello_at >= self._settings.beat_s or not self._hello_at:
            self._hello_at = now
            for name, peer in self._peers.items():
                peer.connector.send(self._hello(peer.complaint))
                if peer.hello is not None and not self._is_ready(peer):
                    self.parent.set_usable(name, False)
            self._forget_loads(now)
        self.parent.tick()
        self.parent.flush()
        self.calls.tick()
        if self.parent.requests and now - self._heard_at > LOST_S:
            self._give_up()

    def _hello(self, refusal: str | None) -> Hello:
        return Hello("api_gateway", self._name, OLDEST_PROTOCOL, PROTOCOL_VERSION, True, None, refusal)

    def _forget_loads(self, now: float) -> None:
        for source in [s for s, (_, heard_at) in self._loads.items() if now - heard_at > FORGET_LOAD_S]:
            del self._loads[source]

    def _give_up(self) -> None:
        error = ErrorInfo(ErrorCode.UNAVAILABLE, f"no tokenizer has answered for {LOST_S:g} s")
        for request in list(self.parent.requests.values()):
            generation, _ = request.context
            generation.fail(error)
            generation.flush()

    async def _keep_resolved(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_S)
            try:
                self._connect(await asyncio.to_thread(resolve, self._endpoints))
            except StartupError as error:
                log.error("an endpoint cannot be used", reason=str(error))

    def _connect(self, endpoints: Sequence[str]) -> None:
        for gone in self._peers.keys() - set(endpoints):
            self._peers.pop(gone).close()
        for endpoint in endpoints:
            if endpoint not in self._peers:
                connector = Connector(
                    endpoint,
                    identity=self._identity,
                    boot=self._boot,
                    curve=self._curve,
                    on_connection=functools.partial(self._on_connection, endpoint),
                )
                peer = self._peers[endpoint] = _Peer(connector, self._on_message)
                peer.pump.start()
        self.parent.set_children(self._peers)


def _complaint(hello: Hello, card: ModelCard | None) -> str | None:
    """Why a tokenizer cannot be worked with; ``card``: what the others serve."""
    if not speaks_our_protocol(hello):
        return (
            f"{hello.name} speaks protocol {hello.oldest_protocol} to {hello.protocol}, "
            f"this gateway {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
        )
    if card is not None and hello.card is not None and hello.card.digest != card.digest:
        return f"{hello.name} serves {hello.card.model}, the others {card.model}"
    return None
