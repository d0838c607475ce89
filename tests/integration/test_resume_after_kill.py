"""A gateway is killed while it answers; its clients go on at another one, and have what an undisturbed run gives."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.streams import CHAT, COMPLETIONS, Joined, stream_of

ROOT = pathlib.Path(__file__).parents[2]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
STORY: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 80, "ignore_eos": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, STORY | {"messages": [{"role": "user", "content": "Tell me a story with 😀 and 你好."}]}),
    "chat of two with logprobs": (
        CHAT,
        STORY | {"messages": [{"role": "user", "content": "Count."}], "n": 2, "logprobs": True, "top_logprobs": 2},
    ),
    "completions with echo": (
        COMPLETIONS,
        STORY | {"prompt": "Once upon a time", "n": 2, "logprobs": 1, "echo": True, "stop": ["zebra crossing"]},
    ),
    "two prompts": (COMPLETIONS, STORY | {"prompt": ["The numbers: one, two,", "日本語のテキスト"], "max_tokens": 60}),
}


class Gateways:
    """Gateways of their own, in front of the tokenizers of a server."""

    def __init__(self, tokenizer: str, folder: pathlib.Path) -> None:
        self._argv = [sys.executable, "-P", "-m", "api_gateway", "--model=demo", f"--tokenizer-endpoint={tokenizer}"]
        self._log = folder / "gateways.log"
        self.running: list[subprocess.Popen[bytes]] = []
        self.asked = 0
        """Requests of all tests so far; each prompt is one."""

    def start(self) -> tuple[str, subprocess.Popen[bytes]]:
        """Its URL and its process, ready."""
        port = free_port()
        with self._log.open("ab") as out:
            process = subprocess.Popen([*self._argv, f"--port={port}"], cwd=ROOT, stdout=out, stderr=out)
        self.running.append(process)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(url + "/ready", timeout=2).close()
                return url, process
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                assert process.poll() is None, self._log.read_text()
                assert time.monotonic() < end, self._log.read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        for process in self.running:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any]) -> Iterator[tuple[Any, Gateways]]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="headrace-resume-"))  # short: ipc paths end at 107 bytes
    run_dir = folder / "run"
    with serving("demo", "--batch-invariant", f"--run-dir={run_dir}") as begun:
        gateways = Gateways(f"ipc://{run_dir}/tokenizer-0.sock", folder)
        yield begun, gateways
        gateways.stop()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def asking(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        yield connection.getresponse()


def read(answer: http.client.HTTPResponse, events: list[tuple[str, Any]], limit: int | None = None) -> None:
    """Append (id, chunk) until ``[DONE]``, which gets None, or until there are ``limit``; cut streams just end."""
    name = ""
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        while (limit is None or len(events) < limit) and (line := answer.readline()):
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "id":
                name = value
            elif field == "data":
                events.append((name, None if value == "[DONE]" else json.loads(value)))


def check_begun(server: Any, count: int) -> None:
    """The tokenizer has begun so many requests, those that it was given again aside, and begins no more."""
    server.wait_until(lambda: server.gauge("headrace:tokenizer_requests_total") >= count)
    time.sleep(1.5)  # more than a beat: it reports with each
    assert server.gauge("headrace:tokenizer_requests_total") == count


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_goes_on_after_kill_9(server: tuple[Any, Gateways], kind: str) -> None:
    demo, gateways = server
    path, body = BODIES[kind]
    body = body | STREAMED
    undisturbed = Joined(stream_of(demo, path, body))
    gateways.asked += 2 * (len(body["prompt"]) if kind == "two prompts" else 1)
    other, _ = gateways.start()
    events: list[tuple[str, Any]] = []
    headers = {"X-Request-Id": f"story of {kind}", "Last-Event-ID": "0"}
    for count in (1, 9, 40):
        url, process = gateways.start() if count < 40 else (other, None)
        with asking(url, path, body, headers) as answer:
            assert answer.status == 200, answer.read()
            read(answer, events, len(events) + count)
            if process is not None:
                os.kill(process.pid, signal.SIGKILL)
            read(answer, events)  # what it had sent before
        headers["Last-Event-ID"] = events[-1][0]
        if events[-1][1] is None:
            break
    chunks = [chunk for _, chunk in events]
    assert chunks.pop() is None
    assert None not in chunks
    got = Joined(chunks)
    assert (got.text, got.finish, got.stop_reason) == (undisturbed.text, undisturbed.finish, undisturbed.stop_reason)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert got.usage["completion_tokens"] == undisturbed.usage["completion_tokens"]
    assert got.usage["prompt_tokens"] == undisturbed.usage["prompt_tokens"]
    for index in undisturbed.logprobs:
        for name in undisturbed.logprobs[index][0]:
            if name != "refusal":
                assert got.column(index, name) == undisturbed.column(index, name), name
    check_begun(demo, gateways.asked)


def test_an_answer_that_is_not_streamed_is_there_for_who_asks_again(server: tuple[Any, Gateways]) -> None:
    demo, gateways = server
    path, body = BODIES["chat of two with logprobs"]
    undisturbed = demo.post(path, body)
    gateways.asked += 2
    (url, process), (other, _) = gateways.start(), gateways.start()
    headers = {"X-Request-Id": "whole", "Last-Event-ID": "0"}

    def ask_in_vain() -> None:
        with contextlib.suppress(http.client.HTTPException, ConnectionError), asking(url, path, body, headers):
            pass

    first = threading.Thread(target=ask_in_vain)
    first.start()
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    first.join()
    with asking(other, path, body, headers) as answer:
        found = json.load(answer)
    assert found["choices"] == undisturbed["choices"]
    assert found["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
    check_begun(demo, gateways.asked)
