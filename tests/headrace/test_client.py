"""The small HTTP client, against a small server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from headrace.client import Reply, RequestFailed, base_url, readiness, stream_chat, wait_until_ready

EVENTS = [
    b": keep-alive\n\n",
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
    'data: {"choices": [{"index": 0, "delta": {"content": "Où?"}}]}\n\n'.encode(),
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\n',
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 1}


class _Gateway(http.server.BaseHTTPRequestHandler):
    answers = 0

    def do_GET(self) -> None:
        type(self).answers += 1
        ready = type(self).answers > 2
        self._reply(
            200 if ready else 503, json.dumps({"error": {"message": "" if ready else "loading weights"}}).encode()
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] is True
        if self.headers["Authorization"] != "Bearer k":
            self._reply(401, b'{"error": {"message": "no such key"}}')
            return
        end = {"error": b'data: {"error": {"message": "gone"}}\n\n', "cut": b""}.get(body["model"], b"data: [DONE]\n\n")
        self._reply(200, b"".join(EVENTS) + end)

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Gateway.answers = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield base_url("0.0.0.0", server.server_port)
        server.shutdown()
        thread.join()


def test_base_url_is_one_that_a_client_can_use() -> None:
    assert base_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert base_url("::", 1) == "http://[::1]:1"
    assert base_url("example.org", 1) == "http://example.org:1"


def test_waits_until_ready(url: str) -> None:
    assert [answer.ready for answer in wait_until_ready(url, 10, every_s=0.01)] == [False, False, True]


def test_waiting_ends_at_its_limit(url: str) -> None:
    assert [answer.text for answer in wait_until_ready(url, 0)] == ["loading weights"]


def test_nobody_there_is_not_ready() -> None:
    assert readiness("http://127.0.0.1:9") == (False, "")


def test_stream(url: str) -> None:
    replies = list(stream_chat(url, {"model": "m"}, api_key="k"))
    assert replies == [Reply("", None), Reply("Où?", None), Reply("", USAGE)]


@pytest.mark.parametrize(
    ("model", "key", "words"), [("m", "", "HTTP 401: no such key"), ("error", "k", "gone"), ("cut", "k", r"\[DONE\]")]
)
def test_failures_raise_the_servers_words(url: str, model: str, key: str, words: str) -> None:
    with pytest.raises(RequestFailed, match=words):
        list(stream_chat(url, {"model": model}, api_key=key))
