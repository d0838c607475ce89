"""A small HTTP client of the gateway, on the standard library: readiness and streamed chat."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Addresses that a server listens on and no client can connect to, and what to connect to instead."""


class Readiness(NamedTuple):
    """Answer of ``/ready``. ``text`` says what is missing; it is "" when nothing answers yet."""

    ready: bool
    text: str


class Reply(NamedTuple):
    """A streamed answer: the text of one event, and the usage object of the event that has one."""

    text: str
    usage: dict[str, Any] | None


class RequestFailed(Exception):
    """The gateway refused a request, or its answer ended with an error event; the text is the server's."""


def base_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a gateway that listens on ``host``."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def readiness(url: str, timeout_s: float = 2.0) -> Readiness:
    """Ask ``/ready`` once. Never raises for a server that is not there or does not answer."""
    with contextlib.closing(_connect(url, timeout_s)) as connection:
        try:
            connection.request("GET", "/ready")
            with connection.getresponse() as response:
                return Readiness(response.status == 200, _words(response.read()))
        except (OSError, http.client.HTTPException):
            return Readiness(False, "")


def stream_chat(url: str, body: dict[str, Any], *, api_key: str = "", timeout_s: float = 60.0) -> Iterator[Reply]:
    """POST ``/v1/chat/completions`` with ``stream`` and its usage, and give each event's text as it arrives.

    ``timeout_s`` bounds the wait for one event. Raises ``RequestFailed``, and ``OSError`` when the connection breaks.
    """
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    with contextlib.closing(_connect(url, timeout_s)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(payload), headers)
        # A connection that the server will close is the response's to close.
        with connection.getresponse() as response:
            if response.status != 200:
                raise RequestFailed(f"HTTP {response.status}: {_words(response.read())}")
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RequestFailed(_words(data))
                text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                yield Reply(text, event.get("usage"))
    raise RequestFailed("the stream ended without [DONE]")


def wait_until_ready(url: str, timeout_s: float, every_s: float = 0.2) -> Iterator[Readiness]:
    """Ask ``/ready`` until it says yes or ``timeout_s`` is over; gives each answer."""
    end = time.monotonic() + timeout_s
    while True:
        answer = readiness(url)
        yield answer
        if answer.ready or time.monotonic() >= end:
            return
        time.sleep(every_s)


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)


def _words(body: bytes) -> str:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return (
            str(error.get("message") or error.get("status") or body.decode()) if isinstance(error, dict) else str(error)
        )
    except (ValueError, AttributeError):
        return body.decode(errors="replace")
