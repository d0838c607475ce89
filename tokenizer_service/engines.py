"""The engines below: one connection for each address, as DNS gives them now, and what each has said of itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from shared.hop.timers import Clock, Timers
from shared.links import speaks_our_protocol
from shared.logging import get_logger
from shared.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, Hello, Message, ModelCard
from shared.transport import Connector, Pump, Received, resolve

REFRESH_S = 3.0
"""Between two looks at DNS."""


class _Engine:
    def __init__(self, link: Connector, pump: Pump) -> None:
        self.link = link
        self.pump = pump
        self.hello: Hello | None = None
        self.refusal: str | None = None
        self.heard_at = 0.0
        self.lost = False
        """Its connection was lost, and it has not said Hello since."""


class Engines:
    """Connections to engines by endpoint.

    Args:
        endpoints: addresses; a DNS name stands for all its addresses.
        card: of the model here; engines with another one are refused.
        connect: makes a connection, which tells its second argument when it is there and when it is lost.
        on_message: gets every message of an engine.
        on_connection: an engine is connected (True), or has been lost for longer than a blip.
        on_change: the set of engines that may get requests, or their readiness, has changed.
        clock: the process's running time.
        timers: an engine that is silent for ``silence_s`` is not ready.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        card: ModelCard,
        connect: Callable[[str, Callable[[bool], None]], Connector],
        on_message: Callable[[Received], None],
        on_connection: Callable[[str, bool], None],
        on_change: Callable[[], None],
        clock: Clock,
        timers: Timers,
    ) -> None:
        self._endpoints = endpoints
        self._card = card
        self._connect = connect
        self._on_message = on_message
        self._on_connection = on_connection
        self._on_change = on_change
        self._clock = clock
        self._timers = timers
        self._engines: dict[str, _Engine] = {}
        self._log = get_logger()

    @property
    def names(self) -> list[str]:
        """Those that may get requests: all that were not refused."""
        return [name for name, engine in self._engines.items() if engine.refusal is None]

    @property
    def ready(self) -> bool:
        """Whether any can take requests."""
        return any(self.is_ready(name) for name in self._engines)

    @property
    def status(self) -> str:
        """In words, while none is ready."""
        for engine in self._engines.values():
            if engine.refusal is not None:
                return f"the engine at {engine.link.endpoint} was refused: {engine.refusal}"
        words = [engine.hello.status for engine in self._engines.values() if engine.hello is not None]
        return next(filter(None, words), "waiting for the engine")

    def is_ready(self, name: str) -> bool:
        engine = self._engines[name]
        says_so = engine.refusal is None and engine.hello is not None and engine.hello.ready
        return says_so and self._clock() - engine.heard_at < self._timers.silence_s

    def is_usable(self, name: str) -> bool:
        """Whether requests should go to this one: it is ready, and its connection was not lost since it said so."""
        return self.is_ready(name) and not self._engines[name].lost

    def send(self, name: str, message: Message) -> bool:
        """False: not now."""
        engine = self._engines.get(name)
        return engine is not None and engine.link.send(message)

    def greet(self, hello: Callable[[str | None], Hello], *, only_new: bool = False) -> None:
        """Say Hello to all, or to those that have not answered yet, or not since they were lost; ``hello`` makes the
        message, with the reason if that engine is refused."""
        for engine in self._engines.values():
            if engine.hello is None or engine.lost or not only_new:
                engine.link.send(hello(engine.refusal))

    def heard(self, name: str, hello: Hello) -> None:
        """An engine said Hello."""
        engine = self._engines.get(name)
        if engine is None:
            return
        before = (engine.refusal, self.is_usable(name))
        refusal = self._refusal(hello)
        engine.hello, engine.refusal, engine.heard_at, engine.lost = hello, refusal, self._clock(), False
        if refusal is not None and refusal != before[0]:
            self._log.error("refused an engine", endpoint=name, reason=refusal)
        if (refusal, self.is_usable(name)) != before:
            self._on_change()

    def _heard_of(self, name: str, connected: bool) -> None:
        """A connection is there, or was lost: at once, or only for a blip, in which nothing moves."""
        if connected:
            self._on_connection(name, True)
        else:
            asyncio.get_running_loop().call_later(self._timers.blip_s, self._after_blip, name)

    def _after_blip(self, name: str) -> None:
        engine = self._engines.get(name)
        if engine is not None and not engine.link.connected:
            self._log.warning("lost the connection to an engine", endpoint=name)
            engine.lost = True
            self._on_connection(name, False)

    async def refresh(self) -> None:
        """Look at DNS again: connect to new addresses, close those that are gone.

        Raises:
            StartupError: an endpoint is malformed, or reaches beyond this machine without keys.
        """
        try:
            found = await asyncio.get_running_loop().run_in_executor(None, resolve, self._endpoints)
        except OSError as error:
            self._log.warning("cannot resolve the engines", endpoints=self._endpoints, reason=str(error))
            return
        gone = self._engines.keys() - set(found)
        new = [name for name in found if name not in self._engines]
        for name in gone:
            self._close(self._engines.pop(name))
        for name in new:
            link = self._connect(name, functools.partial(self._heard_of, name))
            self._engines[name] = _Engine(link, Pump(link, self._on_message))
            self._engines[name].pump.start()
        if gone or new:
            self._on_change()

    def close(self) -> None:
        for engine in self._engines.values():
            self._close(engine)
        self._engines.clear()

    def _close(self, engine: _Engine) -> None:
        engine.pump.stop()
        engine.link.close()

    def _refusal(self, hello: Hello) -> str | None:
        if hello.refusal is not None:
            return f"it refuses us: {hello.refusal}"
        if (words := protocol_refusal(hello)) is not None or hello.card is None:
            return words
        for name in ("digest", "vocab_size", "max_model_len"):
            theirs, ours = getattr(hello.card, name), getattr(self._card, name)
            if theirs != ours:
                return (
                    f"it serves another model: {name} {theirs} of {hello.card.model}, here {ours} of {self._card.model}"
                )
        return None


def protocol_refusal(hello: Hello) -> str | None:
    """Why we cannot talk to the sender of ``hello``, in words."""
    if not speaks_our_protocol(hello):
        return (
            f"it speaks protocol {hello.oldest_protocol}..{hello.protocol}, "
            f"this side {OLDEST_PROTOCOL}..{PROTOCOL_VERSION}; install the same version of headrace on both sides"
        )
    return None
