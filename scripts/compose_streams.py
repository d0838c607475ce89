"""Streams of scripts/compose_test.sh: many greedy completions at once, each read to its end, compared with a first run.

    python scripts/compose_streams.py --expected FILE [--resume | --stopping] [--started FILE] URL...

Stream i goes to URL i (modulo their number). The first run writes its token ids to ``--expected``, later ones must have
the same. A connection that closes, and an error event, are failures, but: with ``--resume`` the client of a gateway
that is killed, or that stops, goes on at the next URL behind the last event that it has; with ``--stopping`` a stream
may end with the error event of a gateway that stops. ``--started`` is made when each stream has begun. Standard library
only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import sys
import threading
import time
import urllib.parse

BEGUN_EVENTS = 3
RETRY_S = 0.2


class Stream(threading.Thread):
    """One request and its client.

    Args:
        index: chooses the prompt and the first URL.
        options: of the command line.
        start_s: when all of them began, ``time.monotonic``.
    """

    def __init__(self, index: int, options: argparse.Namespace, start_s: float) -> None:
        super().__init__(daemon=True)
        self.ids: list[int] = []
        self.events = self.resumed = 0
        self.pause_s = 0.0
        self.problem: str | None = None
        self.ended = self.cut = False
        self._index, self._options = index, options
        self._limit = start_s + options.limit
        self._event_id = "0"
        self._before = start_s
        self._request_id = f"compose-{os.getpid()}-{index}"

    def run(self) -> None:
        attempt = 0
        while self.problem is None and not self.ended:
            url = self._options.urls[(self._index + attempt) % len(self._options.urls)]
            attempt += 1
            try:
                self._read(url)
            except (OSError, http.client.HTTPException) as error:
                self._lost(repr(error))

    def _read(self, url: str) -> None:
        address = urllib.parse.urlsplit(url)
        assert address.hostname is not None
        with contextlib.closing(http.client.HTTPConnection(address.hostname, address.port, timeout=150)) as connection:
            headers = {"Content-Type": "application/json", "X-Request-Id": self._request_id}
            if self._options.resume:
                headers["Last-Event-ID"] = self._event_id
            connection.request("POST", "/v1/completions", json.dumps(self._body()), headers)
            answer = connection.getresponse()
            if answer.status == 503 and self._options.resume:
                return self._lost("503")
            if answer.status != 200:
                self.problem = f"status {answer.status}: {answer.read()[:300]!r}"
                return None
            event_id = self._event_id
            for line in answer:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: ") and line.endswith(b"\n"):
                    self._take(line[6:].strip())
                    self._event_id = event_id
            if not self.ended and self.problem is None:
                self._lost("the stream ended without [DONE]")

    def _body(self) -> dict[str, object]:
        return {
            "model": "demo",
            "prompt": f"Story number {self._index}: once upon a time there was a mill, and",
            "max_tokens": self._options.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def _take(self, data: bytes) -> None:
        now = time.monotonic()
        self.pause_s, self._before = max(self.pause_s, now - self._before), now
        self.events += 1
        if data == b"[DONE]":
            self.ended = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self._refused(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.ids += choice.get("token_ids") or []

    def _refused(self, error: dict[str, object]) -> None:
        stops = error["code"] == 503
        if stops and self._options.stopping:
            self.ended = self.cut = True
        elif stops and self._options.resume:
            raise ConnectionError("the gateway stops")
        else:
            self.problem = f"after {len(self.ids)} tokens: {error}"

    def _lost(self, words: str) -> None:
        if not self._options.resume or time.monotonic() > self._limit:
            self.problem = f"after {len(self.ids)} tokens: {words}"
            return
        self.resumed += 1
        time.sleep(RETRY_S)


def main() -> int:
    """Return 1, and say why, if any stream was not what it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--expected", type=pathlib.Path, required=True)
    parser.add_argument("--started", type=pathlib.Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds until all must have ended")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stopping", action="store_true")
    options = parser.parse_args()
    start_s = time.monotonic()
    streams = [Stream(index, options, start_s) for index in range(options.streams)]
    for stream in streams:
        stream.start()
    while any(stream.is_alive() for stream in streams) and time.monotonic() < start_s + options.limit:
        if options.started and all(stream.events >= BEGUN_EVENTS for stream in streams):
            options.started.touch()
        time.sleep(0.05)
    if not options.expected.exists():
        options.expected.write_text(json.dumps([stream.ids for stream in streams]))
    expected = json.loads(options.expected.read_text())
    failed = 0
    for index, stream in enumerate(streams):
        if stream.is_alive():
            stream.problem = stream.problem or f"has not ended; {len(stream.ids)} tokens"
        elif stream.problem is None:
            wanted = expected[index][: len(stream.ids) if stream.cut else options.tokens]
            if stream.ids != wanted:
                stream.problem = f"other tokens: {stream.ids} for {wanted}"
        if stream.problem:
            failed += 1
            print(f"stream {index}: {stream.problem}", file=sys.stderr)
    print(
        f"{len(streams)} streams, {sum(len(stream.ids) for stream in streams)} tokens in "
        f"{time.monotonic() - start_s:.1f} s; longest pause {max(stream.pause_s for stream in streams):.1f} s; "
        f"connections made again {sum(stream.resumed for stream in streams)}; "
        f"ended by a stop {sum(stream.cut for stream in streams)}; failed {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
