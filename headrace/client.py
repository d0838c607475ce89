"""A small HTTP client of the gateway, on the standard library: readiness, streamed chat and completions."""

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

    @property
    def answered(self) -> bool:
        """Whether a server is there at all."""
        return self.ready or bool(self.text)


class Reply(NamedTuple):
    """A streamed answer: the text of one event, and the usage object of the event that has one."""

    text: str
    usage: dict[str, Any] | None


class RequestFailed(Exception):
    """A request got no answer or none to its end. The text is the server's, or says what broke the connection."""


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
                return Readiness(response.status == 200, _words(response.read()) or f"HTTP {response.status}")
        except (OSError, http.client.HTTPException):
            return Readiness(False, "")


def stream_chat(url: str, body: dict[str, Any], *, api_key: str = "", timeout_s: float = 60.0) -> Iterator[Reply]:
    """POST ``/v1/chat/completions`` with ``stream`` and its usage, and give each event's text as it arrives.

    ``timeout_s`` bounds the wait for one event. Raises ``RequestFailed``. Closing the iterator hangs up, upon which the
    server stops generating.
    """
    for event in _stream(url, "/v1/chat/completions", body, api_key, timeout_s):
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        yield Reply(text, event.get("usage"))


def stream_completion(url: str, body: dict[str, Any], *, api_key: str = "", timeout_s: float = 60.0) -> Iterator[Reply]:
    """POST ``/v1/completions``; otherwise as ``stream_chat``."""
    for event in _stream(url, "/v1/completions", body, api_key, timeout_s):
        yield Reply("".join(choice["text"] for choice in event["choices"]), event.get("usage"))


def wait_until_ready(url: str, timeout_s: float, every_s: float = 0.2) -> Iterator[Readiness]:
    """Ask ``/ready`` until it says yes or ``timeout_s`` is over; gives each answer."""
    end = time.monotonic() + timeout_s
    while True:
        answer = readiness(url)
        yield answer
        if answer.ready or time.monotonic() >= end:
            return
        time.sleep(every_s)


def _stream(url: str, route: str, body: dict[str, Any], api_key: str, timeout_s: float) -> Iterator[dict[str, Any]]:
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    with _in_words(url, timeout_s), contextlib.closing(_connect(url, timeout_s)) as connection:
        connection.request("POST", route, json.dumps(payload), headers)
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
                yield event
    raise RequestFailed("the stream ended without [DONE]")


@contextlib.contextmanager
def _in_words(url: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except ConnectionRefusedError as error:
        raise RequestFailed(f"nothing listens at {url} (connection refused)") from error
    except TimeoutError as error:
        raise RequestFailed(f"{url} has sent nothing for {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"the connection to {url} failed: {error}") from error
    except ValueError as error:
        raise RequestFailed(f"{url}: {error}") from error


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


def _words(body: bytes) -> str:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return (
            str(error.get("message") or error.get("status") or body.decode()) if isinstance(error, dict) else str(error)
        )
    except (ValueError, AttributeError):
        return body.decode(errors="replace")
