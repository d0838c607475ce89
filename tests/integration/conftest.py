"""A whole server on loopback for the tests of this folder: four real processes, the built-in model."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from waiting import wait_until

ROOT = pathlib.Path(__file__).parents[2]


@dataclass
class Server:
    """A running server: its base URL, its launcher process and the file with its log."""

    url: str
    process: subprocess.Popen[bytes]
    log: pathlib.Path

    def get(self, path: str, timeout: float = 10) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return answer.read().decode()

    def post(self, path: str, body: object, timeout: float = 120) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def gauge(self, name: str) -> float:
        """The sum over all label sets of a metric in the scraped page."""
        found = [line for line in self.get("/metrics").splitlines() if line.startswith((name + "{", name + " "))]
        assert found, f"{name} is not on the metrics page"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def wait_idle(self, seconds: float) -> None:
        """Wait until nothing runs, waits or holds blocks; fails after ``seconds``."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any((left := {name: self.gauge(name) for name in names}).values()):
            assert time.monotonic() < end, f"still held after {seconds} s: {left}"
            time.sleep(0.05)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait for a figure, which each process reports once a beat."""
        wait_until(condition, seconds, every_s=0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(log: pathlib.Path, model: str, *flags: str, ready_s: float = 120) -> Iterator[Server]:
    """Start ``headrace serve``, wait until it is ready, and stop it; it must end with status 0 and leave no child."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "headrace.cli", "serve", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_ready(server, ready_s)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-4000:]
        assert not _members(process.pid), "processes are left behind"
    finally:
        for pid in _members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait_ready(server: Server, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            server.get("/ready", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            code = server.process.poll()
            assert code is None, f"ended with {code}:\n{server.log.read_text()[-4000:]}"
            assert time.monotonic() < end, f"not ready in {seconds} s:\n{server.log.read_text()[-4000:]}"
            time.sleep(0.1)


def _members(session: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split() if entry.name.isdigit() else None
        except OSError:
            continue
        if fields and int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Server]]:
    """``with serving(model, *flags) as server``: a server for as long as the block."""
    return lambda model, *flags: running(tmp_path_factory.mktemp("server") / "log.txt", model, *flags)


@pytest.fixture(scope="session")
def start(serving: Callable[..., AbstractContextManager[Server]]) -> Iterator[Callable[..., Server]]:
    """``start(model, *flags)``: a server that lives as long as the test session."""
    with ExitStack() as stack:
        yield lambda model, *flags: stack.enter_context(serving(model, *flags))


@pytest.fixture(scope="session")
def demo(start: Callable[..., Server]) -> Server:
    """The built-in model with default settings."""
    return start("demo")
