"""Stands between a ROUTER and the DEALERs that connect to it, and does to messages what a network and bad memory do.

    DEALER (identity) ──► ROUTER [proxy] DEALER (same identity) ──► ROUTER

Each DEALER gets a twin with its identity, so that the listener sees the same peers as without the proxy. A message is a
list of frames, passed on as it is or with one fault, drawn from a seeded generator. Since it speaks ZeroMQ itself, only
what is inside frames can suffer; ``StreamProxy`` turns bits of the stream of bytes, ZeroMQ's own framing included.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from shared.codec import decode
from shared.errors import ProtocolError
from shared.frames import join, split

DELAY, DROP, DUPLICATE, REORDER = "delay", "drop", "duplicate", "reorder"
TRUNCATE, CORRUPT, MISFRAME = "truncate", "corrupt", "misframe"
DAMAGE = (TRUNCATE, CORRUPT, MISFRAME)
"""Bytes cut off a frame; one to four bits turned in a frame; frames of a message missing, repeated or in another order.
Each must be noticed by whoever receives the message."""
MIX = (DELAY, DROP, DUPLICATE, REORDER, *DAMAGE)
"""After each of these an answer must be the same."""
HOLD_S = 0.05
"""How long a message waits for one to pass it."""
POLL_MS = 5

Frames = list[bytes]
Send = Callable[[Frames], None]


class FaultProxy:
    """Listens at ``listen`` for what connects to ``upstream``; a thread of its own from ``start`` to ``stop``.

    Args:
        kinds: faults to choose from.
        rate: share of messages that get one.
        delay_s: longest delay.
        grace: the first so many messages of a peer in each direction pass unharmed.
    """

    def __init__(
        self,
        listen: str,
        upstream: str,
        kinds: Iterable[str],
        *,
        seed: int,
        rate: float = 0.1,
        delay_s: float = 0.3,
        grace: int = 0,
    ) -> None:
        self.kinds = tuple(kinds)
        self.rate = rate
        self.active = True
        """Set to False to pass everything on."""
        self.counts: Counter[str] = Counter()
        """Messages by what was done to them: a kind, ``passed``, or ``accepted``: damaged, yet the codec reads it."""
        self._delay_s, self._grace = delay_s, grace
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(listen)
        self._upstream = upstream
        self._twins: dict[bytes, zmq.Socket[bytes]] = {}
        self._seen: Counter[tuple[bytes, bool]] = Counter()
        self._waiting: list[tuple[float, int, Send, Frames]] = []
        self._passing: dict[tuple[bytes, bool], int] = {}
        """Direction of a peer → number of the message that waits for one to pass it."""
        self._number = itertools.count()
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def start(self) -> FaultProxy:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _twin(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self._twins:
            twin = self._socket(zmq.DEALER)
            twin.setsockopt(zmq.ROUTING_ID, identity)
            twin.connect(self._upstream)
            self._poller.register(twin, zmq.POLLIN)
            self._twins[identity] = twin
        return self._twins[identity]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                ready = dict(self._poller.poll(POLL_MS))
                if self._front in ready:
                    identity, part = self._front.recv_multipart()
                    self._handle((identity, True), split_frames(part), self._twin(identity))
                for identity, twin in list(self._twins.items()):
                    if twin in ready:
                        self._handle((identity, False), split_frames(twin.recv()), self._front)
                self._send_due()
        finally:
            for socket in (self._front, *self._twins.values()):
                socket.close()
            self._context.term()

    def _send_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, send, frames = heapq.heappop(self._waiting)
            send(frames)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _handle(self, way: tuple[bytes, bool], frames: Frames, socket: zmq.Socket[bytes]) -> None:
        prefix = [] if way[1] else [way[0]]

        def send(message: Frames) -> None:
            try:
                socket.send_multipart([*prefix, join(message)], zmq.NOBLOCK)
            except zmq.ZMQError:
                self.counts["lost"] += 1

        self._seen[way] += 1
        harmed = self.active and self._seen[way] > self._grace and self._rng.random() < self.rate
        kind = self._rng.choice(self.kinds) if harmed else "passed"
        self.counts[kind] += 1
        if kind in (DELAY, REORDER):
            pause = self._rng.uniform(0.0, self._delay_s) if kind == DELAY else HOLD_S
            self._wait(pause, send, frames, way if kind == REORDER else None)
            return
        for message in self._harmed(kind, frames):
            send(message)
        self._let_pass(way)

    def _harmed(self, kind: str, frames: Frames) -> list[Frames]:
        """What is sent in place of ``frames``, by kind."""
        if kind == DROP:
            return []
        if kind == DUPLICATE:
            return [frames, frames]
        if kind not in DAMAGE:
            return [frames]
        damaged = damage(kind, frames, self._rng)
        self.counts["accepted"] += readable(damaged)
        return [damaged]

    def _wait(self, pause: float, send: Send, frames: Frames, way: tuple[bytes, bool] | None) -> None:
        number = next(self._number)
        heapq.heappush(self._waiting, (time.monotonic() + pause, number, send, frames))
        if way is not None:
            self._passing[way] = number

    def _let_pass(self, way: tuple[bytes, bool]) -> None:
        """A message has passed the one that waited for it."""
        number = self._passing.pop(way, None)
        for item in self._waiting:
            if item[1] == number:
                self._waiting.remove(item)
                heapq.heapify(self._waiting)
                item[2](item[3])
                return


class StreamProxy:
    """Passes tcp connections on to ``port`` and turns bits of what goes through them, but not of the handshake.

    Args:
        spacing: one bit of so many bytes.
    """

    HANDSHAKE_BYTES = 300

    def __init__(self, port: int, *, seed: int, spacing: int = 3000) -> None:
        self.turned = 0
        self._upstream, self._spacing = port, spacing
        self._rng = random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                accepted = self._server.accept()[0]
                self._sockets.append(accepted)
                pair = accepted, socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                return
            self._sockets.append(pair[1])
            for source, target in (pair, pair[::-1]):
                self._begin(self._pass_on, source, target)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(65536)):
                if passed > self.HANDSHAKE_BYTES:
                    self._turn(data)
                passed += len(data)
                target.sendall(data)
        except OSError:
            pass
        _shut_down(source, target)

    def _turn(self, data: bytearray) -> None:
        for place in range(len(data)):
            if self._rng.random() < 1 / self._spacing:
                data[place] ^= 1 << self._rng.randrange(8)
                self.turned += 1

    def stop(self) -> None:
        _shut_down(self._server, *self._sockets)
        for thread in self._threads:
            thread.join()
        for each in (self._server, *self._sockets):
            each.close()


def _shut_down(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def split_frames(part: bytes) -> Frames:
    return [bytes(frame) for frame in split(part)]


def damage(kind: str, frames: Frames, rng: random.Random) -> Frames:
    """Other frames than these, by a kind of ``DAMAGE``; none at all are no message, so one is left."""
    harm = {TRUNCATE: _truncate, CORRUPT: _turn_bits, MISFRAME: _misframe}[kind]
    while True:
        damaged = list(frames)
        harm(damaged, rng)
        if damaged and damaged != frames:
            return damaged


def _truncate(frames: Frames, rng: random.Random) -> None:
    place = rng.randrange(len(frames))
    frames[place] = frames[place][: rng.randrange(len(frames[place]) or 1)]


def _turn_bits(frames: Frames, rng: random.Random) -> None:
    place = rng.randrange(len(frames))
    content = bytearray(frames[place])
    for _ in range(rng.randint(1, 4) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    frames[place] = bytes(content)


def _misframe(frames: Frames, rng: random.Random) -> None:
    place, other = rng.randrange(len(frames)), rng.randrange(len(frames))
    match rng.choice(("missing", "end missing", "repeated", "moved")):
        case "missing":
            del frames[place]
        case "end missing":
            del frames[place:]
        case "repeated":
            frames.insert(other, frames[place])
        case _:
            frames.insert(other, frames.pop(place))


def readable(frames: Frames) -> bool:
    try:
        decode(split(join(frames)))
    except ProtocolError:
        return False
    return True


def total(proxies: Iterable[Any]) -> Counter[str]:
    """What several proxies did."""
    return sum((proxy.counts for proxy in proxies), Counter())
