"""What the four services have in common at their links: names, keys, default addresses, who can talk to whom."""

from __future__ import annotations

import os
import socket

from shared.config import Settings
from shared.curve import CurveKeys, load_curve_keys
from shared.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, Hello

DEFAULT_TOKENIZER_ENDPOINT = "tcp://127.0.0.1:5551"
DEFAULT_ENGINE_ENDPOINT = "tcp://127.0.0.1:5552"
DEFAULT_WORKERS_ENDPOINT = "tcp://127.0.0.1:5553"


def process_name(settings: Settings) -> str:
    """The name of this process among its kind."""
    return settings.name or f"{socket.gethostname()}-{os.getpid()}"


def curve_keys_of(settings: Settings) -> CurveKeys | None:
    """The keys of tcp links; None: there is no folder with keys.

    Raises:
        StartupError: the folder's keys cannot be used.
    """
    return load_curve_keys(settings.curve_dir) if settings.curve_dir else None


def speaks_our_protocol(hello: Hello) -> bool:
    """Whether the sender's range of protocols and ours have one in common."""
    return hello.oldest_protocol <= PROTOCOL_VERSION and hello.protocol >= OLDEST_PROTOCOL
