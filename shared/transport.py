"""Links between processes over ZeroMQ: the only module that knows it.

One socket per peer pair, one owning thread per socket. A ``Listener`` is a ROUTER that binds, a ``Connector`` a DEALER
that connects to exactly one address. Nothing here blocks: a send that cannot go out now returns False and the caller
sends later (a merged range, the next beat). ZeroMQ may also lose what it accepted: ``docs/protocol.md`` copes with it.

Socket options, and why:

- ``ROUTER_MANDATORY``: a message to an unknown peer is an error that we see, not a silent drop.
- ``ROUTER_HANDOVER``: a peer that reconnects under its identity replaces its old, half-dead connection.
- ``IMMEDIATE`` on connectors: nothing is queued for an address that is not connected. A restarted peer is not buried
  under stale messages, and the sender learns at once that nobody is there.
- ``LINGER 0`` and finite high-water marks: a dead or stopped peer costs bounded memory and never holds up an exit.

The kernel closes the connections of a process that ends, however it ends. A link whose owner wants to hear of that has
a monitor: a second socket, which a ``Poller`` or ``Pump`` reads beside the link's own.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import zmq
import zmq.auth.thread

from shared import endpoints
from shared.codec import MAX_MESSAGE_BYTES, decode, encode
from shared.curve import CurveKeys, load_curve_keys, write_curve_keys
from shared.endpoints import resolve
from shared.errors import ProtocolError, StartupError
from shared.frames import join, split
from shared.messages import Message
from shared.pump import Pump

__all__ = [
    "Connector",
    "CurveKeys",
    "Link",
    "Listener",
    "Poller",
    "Pump",
    "Received",
    "libzmq",
    "load_curve_keys",
    "make_curve_keys",
    "new_boot",
    "resolve",
]

HIGH_WATER_MARK = 1000
"""Messages that a peer may leave unread before a send to it returns False."""
RECONNECT_MS = 50
"""Once to twice this time passes between two attempts to connect, however many have failed: one that is refused costs
less than 0.1 ms, and every process that waits for a restarted one goes on at once."""
MAX_IDENTITY_BYTES = 255

OnMalformed: TypeAlias = Callable[[str, ProtocolError], None]


def new_boot() -> int:
    """A boot id: random, 63 bits, never 0."""
    return secrets.randbits(63) or 1


def libzmq() -> tuple[str, bool]:
    """Version of the ZeroMQ library, and whether it can encrypt with CURVE."""
    return zmq.zmq_version(), zmq.has("curve")


def make_curve_keys(folder: str | Path) -> CurveKeys:
    """Make key pairs for the binding and the connecting sides and write them to a folder (``shared.curve``).

    Raises:
        StartupError: keys are there already.
    """
    return write_curve_keys(folder, zmq.curve_keypair(), zmq.curve_keypair())


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message and who sent it."""

    peer: str
    """From a listener: the identity of the sender. From a connector: its endpoint."""
    boot: int
    message: Message


class _Socket:
    """What both ends share: options, counters, and the wish of a pump to hear about sends."""

    endpoint: str
    malformed: int
    """Messages that arrived broken and were dropped."""

    def __init__(self, kind: int, boot: int, on_malformed: OnMalformed | None) -> None:
        self.boot = boot
        self.malformed = 0
        self.on_sent: Callable[[], None] | None = None
        self._on_malformed = on_malformed
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket = _context().socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: HIGH_WATER_MARK,
            zmq.RCVHWM: HIGH_WATER_MARK,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 10,
            zmq.TCP_KEEPALIVE_INTVL: 5,
            zmq.TCP_KEEPALIVE_CNT: 3,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For ``Poller`` and ``Pump``."""
        return self._socket

    @property
    def monitor(self) -> zmq.Socket[bytes] | None:
        """For ``Poller`` and ``Pump``: when it is readable ``follow`` has something to do."""
        return self._monitor

    def _watch(self, events: int) -> None:
        """Begin to hear of connections. Call it before there can be any."""
        address = f"inproc://monitor-{secrets.token_hex(8)}"
        self._socket.monitor(address, events)
        self._monitor = _context().socket(zmq.PAIR)
        # No limit: ZeroMQ's own thread, and with it every link, would wait until a full monitor is read.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)

    def follow(self) -> None:
        """Tell the owner of what has become of connections."""
        events = []
        with contextlib.suppress(zmq.Again):
            while self._monitor is not None:
                event = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
                events.append(int.from_bytes(event[:2], sys.byteorder))
        if events:
            self._socket.get(zmq.EVENTS)  # by which the socket takes up its new and its lost connections
            self._heard(events)

    def _heard(self, events: list[int]) -> None:
        raise NotImplementedError

    @property
    def readable(self) -> bool:
        """Whether a message waits. Reading it also re-arms the edge-triggered file descriptor."""
        return bool(self._socket.get(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]

    def _transmit(self, message: Message, peer: bytes | None = None) -> bool:
        part = join(encode(message, self.boot))
        try:
            if peer is not None:
                self._socket.send(peer, _NOBLOCK_MORE)
            self._socket.send(part, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            if self.on_sent is not None:
                self.on_sent()
        return True

    def _parts(self) -> list[bytes] | None:
        with contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.NOBLOCK)
        return None

    def _decoded(self, peer: str, parts: list[bytes]) -> Received | None:
        try:
            boot, message = decode([frame for part in parts for frame in split(part)])
        except ProtocolError as error:
            self.malformed += 1
            if self._on_malformed is not None:
                self._on_malformed(peer, error)
            return None
        return Received(peer, boot, message)

    def close(self) -> None:
        """Drop what was not sent, and close. May be called again."""
        self.on_sent = None
        if self._monitor is not None:
            self._socket.monitor(None, 0)
            self._monitor.close(linger=0)
            self._monitor = None
        self._socket.close(linger=0)


class Listener(_Socket):
    """A ROUTER: binds one endpoint and talks to any number of peers by their identities."""

    def __init__(
        self,
        endpoint: str,
        *,
        boot: int,
        curve: CurveKeys | None = None,
        insecure: bool = False,
        on_malformed: OnMalformed | None = None,
        on_disconnected: Callable[[], None] | None = None,
    ) -> None:
        """Bind. ``tcp://HOST:0`` takes a free port; ``self.endpoint`` says which.

        ``curve`` is used for tcp only. ``on_malformed(peer, error)`` hears of broken messages, which are dropped.
        ``on_disconnected()`` is a hint that somebody's connection was lost, a stranger's perhaps: which peers can no
        longer be sent to shows at the next send to them. ``Poller`` and ``Pump`` call it.

        Raises:
            StartupError: the endpoint is in use or cannot be bound, is too long, or is beyond this machine while
                there are neither keys nor ``insecure``.
        """
        curve = None if endpoints.is_ipc(endpoint) else curve
        endpoints.check_trust(endpoint, encrypted=insecure or curve is not None)
        super().__init__(zmq.ROUTER, boot, on_malformed)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._domain: str | None = None
        self._file: tuple[str, int] | None = None
        self._on_disconnected = on_disconnected
        try:
            if curve is not None:
                self._require_curve(curve)
            if on_disconnected is not None:
                self._watch(zmq.EVENT_DISCONNECTED)
            self._bind(endpoint)
        except BaseException:
            self.close()
            raise
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _require_curve(self, curve: CurveKeys) -> None:
        self._socket.curve_publickey, self._socket.curve_secretkey = curve.for_server()
        self._socket.curve_server = True
        self._domain = _gatekeeper.admit(curve.authorized)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, self._domain.encode())

    def _bind(self, endpoint: str) -> None:
        address = endpoints.to_numeric(endpoint)
        if endpoints.is_ipc(endpoint):
            endpoints.clear_stale_ipc(endpoints.ipc_path(endpoint))
        elif ":" in endpoints.parse_tcp(address).host:
            self._socket.setsockopt(zmq.IPV6, 1)
        before = os.umask(0o177)  # the socket file is the owner's alone from its first moment
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            cause = "is in use by another process" if error.errno == zmq.EADDRINUSE else f"cannot be bound: {error}"
            raise StartupError(f"{endpoint} {cause}") from error
        finally:
            os.umask(before)
        if endpoints.is_ipc(endpoint):
            path = endpoints.ipc_path(endpoint)
            self._file = path, os.stat(path).st_ino

    def send(self, peer: str, message: Message) -> bool:
        """Send to the peer of that identity; False: it is not connected, or reads too slowly."""
        return self._transmit(message, peer.encode("latin-1"))

    def receive(self) -> Received | None:
        """The next message; None: nothing is there. Broken ones are counted and skipped."""
        while (parts := self._parts()) is not None:
            received = self._decoded(parts[0].decode("latin-1"), parts[1:])
            if received is not None:
                return received
        return None

    def _heard(self, events: list[int]) -> None:
        if self._on_disconnected is not None:
            self._on_disconnected()

    def close(self) -> None:
        super().close()
        if self._domain is not None:
            _gatekeeper.dismiss(self._domain)
            self._domain = None
        if self._file is not None:
            endpoints.remove_ipc(*self._file)
            self._file = None


class Connector(_Socket):
    """A DEALER: connects to one endpoint, and again whenever the connection is lost."""

    def __init__(
        self,
        endpoint: str,
        *,
        identity: str,
        boot: int,
        curve: CurveKeys | None = None,
        insecure: bool = False,
        on_malformed: OnMalformed | None = None,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        """``identity`` names this process to the listener: role and incarnation (``gateway/3f9a…``), ASCII.

        ``on_connection(connected)`` hears when messages can be sent (after the CURVE handshake, if there is one), and
        when the connection is lost. ``Poller`` and ``Pump`` call it.

        Raises:
            StartupError: the endpoint is malformed, or is beyond this machine while there are neither keys nor
                ``insecure``.
            ValueError: the identity is empty, too long or not printable ASCII.
        """
        if not identity.isascii() or not identity.isprintable() or not 1 <= len(identity) <= MAX_IDENTITY_BYTES:
            raise ValueError(f"identity {identity!r} is not 1 to {MAX_IDENTITY_BYTES} printable ASCII characters")
        curve = None if endpoints.is_ipc(endpoint) else curve
        endpoints.check_trust(endpoint, encrypted=insecure or curve is not None)
        if endpoints.is_ipc(endpoint):
            endpoints.ipc_path(endpoint)
        super().__init__(zmq.DEALER, boot, on_malformed)
        self.endpoint = endpoint
        self.connected = False
        """What ``on_connection`` was told last."""
        self._on_connection = on_connection
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            if curve is not None:
                public, secret, server = curve.for_client()
                self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
                self._socket.curve_serverkey = server
            if not endpoints.is_ipc(endpoint) and ":" in endpoints.parse_tcp(endpoint).host:
                self._socket.setsockopt(zmq.IPV6, 1)
            if on_connection is not None:
                self._watch(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"cannot connect to {endpoint}: {error}") from error
        except StartupError:
            self.close()
            raise

    def send(self, message: Message) -> bool:
        """Send to the listener; False: there is no connection now, or it reads too slowly."""
        return self._transmit(message)

    def receive(self) -> Received | None:
        """The next message, with the endpoint as its ``peer``; None: nothing is there."""
        while (parts := self._parts()) is not None:
            received = self._decoded(self.endpoint, parts)
            if received is not None:
                return received
        return None

    def _heard(self, events: list[int]) -> None:
        for event in events:
            # A handshake that fails ends with DISCONNECTED, too.
            connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if connected != self.connected and self._on_connection is not None:
                self.connected = connected
                self._on_connection(connected)


_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # to combine enums costs as much as a send

Link: TypeAlias = Listener | Connector


class Poller:
    """Waits for messages on several links: for services with a loop of their own."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._links: dict[zmq.Socket[bytes], Link] = {}
        self._monitored: dict[zmq.Socket[bytes], Link] = {}

    def register(self, link: Link) -> None:
        self._links[link.socket] = link
        self._poller.register(link.socket, zmq.POLLIN)
        if link.monitor is not None:
            self._monitored[link.monitor] = link
            self._poller.register(link.monitor, zmq.POLLIN)

    def unregister(self, link: Link) -> None:
        """Call it before the link is closed."""
        del self._links[link.socket]
        self._poller.unregister(link.socket)
        if link.monitor is not None:
            del self._monitored[link.monitor]
            self._poller.unregister(link.monitor)

    def poll(self, timeout_s: float) -> list[Link]:
        """The links that have messages, after at most that time (0: at once), or earlier if a connection has changed:
        then ``on_connection`` or ``on_disconnected`` was called."""
        ready = [socket for socket, _ in self._poller.poll(max(0, round(timeout_s * 1000)))]
        for socket in ready:
            if (link := self._monitored.get(socket)) is not None:
                link.follow()
        return [self._links[socket] for socket in ready if socket in self._links]


# -- this process's ZeroMQ -------------------------------------------------------------------------------------------


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """The context of this process; a forked child gets a new one."""
    return zmq.Context.instance()


class _Gatekeeper:
    """Lets only authorized clients through CURVE: one authenticator thread from the first listener that needs it on.

    Each listener has a ZAP domain of its own, which stands for its list of public keys.
    """

    def __init__(self) -> None:
        self._authorized: dict[str, frozenset[bytes]] = {}
        self._thread: zmq.auth.thread.ThreadAuthenticator | None = None

    def admit(self, authorized: frozenset[bytes]) -> str:
        """A domain in which these keys are let in."""
        thread = self._running()
        domain = secrets.token_hex(8)
        self._authorized[domain] = authorized
        thread.configure_curve_callback(domain, self)
        return domain

    def dismiss(self, domain: str) -> None:
        self._authorized.pop(domain, None)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator's thread: may the client with this public key (Z85) connect?"""
        return key in self._authorized.get(domain, frozenset())

    def _running(self) -> zmq.auth.thread.ThreadAuthenticator:
        # Its address is free again only some time after it has stopped: so it runs until the process ends.
        if self._thread is None or self._thread.context is not _context():
            self._thread = zmq.auth.thread.ThreadAuthenticator(_context())
            self._thread.start()
            atexit.register(self._thread.stop)
        return self._thread


_gatekeeper = _Gatekeeper()
