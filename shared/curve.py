"""The CURVE keys of tcp links, as files: one text line (Z85, 40 characters) in each.

``server.public`` / ``server.secret`` belong to the binding sides, ``client.public`` / ``client.secret`` to the
connecting ones. A process needs only the files of the sides that it has. ``authorized_clients`` (optional) names
further clients that may connect: one public key a line, and anything after it; lines that begin with ``# `` are
comments (a key may contain ``#``).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from shared.errors import StartupError

KEY_LENGTH = 40
SERVER_PUBLIC, SERVER_SECRET = "server.public", "server.secret"
CLIENT_PUBLIC, CLIENT_SECRET = "client.public", "client.secret"
AUTHORIZED_CLIENTS = "authorized_clients"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """Z85 keys. Never printed."""

    server_public: bytes | None = None
    server_secret: bytes | None = None
    client_public: bytes | None = None
    client_secret: bytes | None = None
    authorized: frozenset[bytes] = frozenset()
    """Public keys of the clients that a listener lets in."""

    def for_server(self) -> tuple[bytes, bytes]:
        """Public and secret key of a binding side.

        Raises:
            StartupError: one is missing.
        """
        if self.server_public is None or self.server_secret is None:
            raise StartupError(f"CURVE keys: a listener needs {SERVER_PUBLIC} and {SERVER_SECRET}")
        return self.server_public, self.server_secret

    def for_client(self) -> tuple[bytes, bytes, bytes]:
        """Public and secret key of a connecting side, and the public key of the server.

        Raises:
            StartupError: one is missing.
        """
        if self.client_public is None or self.client_secret is None or self.server_public is None:
            raise StartupError(
                f"CURVE keys: a connecting side needs {CLIENT_PUBLIC}, {CLIENT_SECRET} and {SERVER_PUBLIC}"
            )
        return self.client_public, self.client_secret, self.server_public


def load_curve_keys(folder: str | Path) -> CurveKeys:
    """Read the keys that are in a folder.

    Raises:
        StartupError: no key is there, a file does not hold a key, or others may read a secret.
    """
    folder = Path(folder)
    names = (SERVER_PUBLIC, SERVER_SECRET, CLIENT_PUBLIC, CLIENT_SECRET)
    server_public, server_secret, client_public, client_secret = keys = [_read_key(folder / name) for name in names]
    if not any(keys):
        raise StartupError(f"{folder} holds no CURVE keys ({', '.join(names)})")
    authorized = {client_public} if client_public else set()
    more = folder / AUTHORIZED_CLIENTS
    if more.exists():
        lines = (line.split() for line in more.read_text().splitlines())
        authorized |= {_checked(words[0], more) for words in lines if words and words[0] != "#"}
    return CurveKeys(server_public, server_secret, client_public, client_secret, frozenset(authorized))


def write_curve_keys(folder: str | Path, server: tuple[bytes, bytes], client: tuple[bytes, bytes]) -> CurveKeys:
    """Write (public, secret) of both sides into a folder, readable by the owner alone.

    Raises:
        StartupError: keys are there already.
    """
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = dict(zip((SERVER_PUBLIC, SERVER_SECRET, CLIENT_PUBLIC, CLIENT_SECRET), (*server, *client), strict=True))
    for name, key in files.items():
        try:
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise StartupError(f"{folder / name} exists; remove it to make new keys") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")
    return load_curve_keys(folder)


def _read_key(path: Path) -> bytes | None:
    try:
        text, mode = path.read_text(), path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".secret" and mode & 0o077:
        raise StartupError(f"{path} may be read by others (mode {mode & 0o777:o}); chmod 600 it")
    return _checked(text.strip(), path)


def _checked(text: str, path: Path) -> bytes:
    if len(text) != KEY_LENGTH or not text.isascii():
        raise StartupError(f"{path} does not hold a CURVE key of {KEY_LENGTH} characters")
    return text.encode()
