"""Endpoints: ``ipc://PATH`` and ``tcp://HOST:PORT``. What they mean, and which of them may be used."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import StartupError

MAX_IPC_PATH = 107
"""Bytes of ``sockaddr_un.sun_path`` on Linux, less the terminating zero."""


class TcpEndpoint(NamedTuple):
    host: str
    """Name or address, without brackets; ``*`` for all interfaces."""
    port: int


def parse_tcp(endpoint: str) -> TcpEndpoint:
    """Raises:
    StartupError: not ``tcp://HOST:PORT``.
    """
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    digits = "0" if port == "*" else port
    if not endpoint.startswith("tcp://") or not colon or not host or not digits.isdecimal() or int(digits) > 65535:
        raise StartupError(f"endpoint {endpoint!r} is not tcp://HOST:PORT")
    return TcpEndpoint(host.removeprefix("[").removesuffix("]"), int(digits))


def ipc_path(endpoint: str) -> str:
    """The path of an ``ipc://`` endpoint.

    Raises:
        StartupError: it is empty or longer than a socket path can be.
    """
    path = endpoint.removeprefix("ipc://")
    size = len(os.fsencode(path))
    if not path or size > MAX_IPC_PATH:
        raise StartupError(
            f"ipc path {path!r} has {size} bytes; 1 to {MAX_IPC_PATH} are possible: use a shorter folder"
        )
    return path


def is_ipc(endpoint: str) -> bool:
    return endpoint.startswith("ipc://")


def check_trust(endpoint: str, *, encrypted: bool) -> None:
    """Refuse plain tcp beyond this machine.

    Raises:
        StartupError: the endpoint is not ``ipc://`` or loopback and the link is not encrypted.
    """
    if encrypted or is_ipc(endpoint) or _is_loopback(parse_tcp(endpoint).host):
        return
    raise StartupError(
        f"{endpoint} reaches beyond this machine and would not be encrypted: "
        "give a folder with CURVE keys (--curve-dir), or use ipc:// or 127.0.0.1"
    )


def to_numeric(endpoint: str) -> str:
    """A tcp endpoint with its host as an address, as ZeroMQ wants it for a bind; ``*`` and ipc are unchanged.

    Raises:
        StartupError: the host is unknown.
    """
    if is_ipc(endpoint) or parse_tcp(endpoint).host == "*":
        return endpoint
    addresses = resolve([endpoint])
    if not addresses:
        raise StartupError(f"{endpoint}: the host name is unknown")
    return addresses[0]


def resolve(endpoints: Sequence[str]) -> list[str]:
    """One endpoint for each address of each host, sorted, without repeats; ``ipc://`` ones are unchanged.

    A name that does not resolve now stands for nothing: ask again later. Blocks while DNS is asked.
    """
    found: set[str] = set()
    for endpoint in endpoints:
        if is_ipc(endpoint):
            found.add(endpoint)
            continue
        host, port = parse_tcp(endpoint)
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            continue
        addresses = {str(answer[4][0]) for answer in answers}
        # A name of this machine has ::1 beside 127.0.0.1: two ways to one peer, not two peers.
        plain = {address for address in addresses if ":" not in address} or addresses
        found |= {f"tcp://[{a}]:{port}" if ":" in a else f"tcp://{a}:{port}" for a in plain}
    return sorted(found)


def clear_stale_ipc(path: str) -> None:
    """Remove the socket file of a dead listener.

    ZeroMQ unlinks whatever is at the path before it binds, so without this check it would take over a live socket.

    Raises:
        StartupError: somebody listens there, or the path is something else than a socket.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise StartupError(f"ipc://{path} cannot be used: {error}") from error
    raise StartupError(f"ipc://{path} is in use by another process")


def remove_ipc(path: str, inode: int) -> None:
    """Remove a listener's own socket file; another one that took its place stays."""
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_ino == inode:
            os.unlink(path)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
