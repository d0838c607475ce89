"""``headrace serve demo`` as a user runs it: real processes, real signals."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from waiting import wait_until

from headrace.client import RequestFailed, base_url, stream_chat, wait_until_ready
from headrace.launcher import claim_port
from shared.config import ENGINE, GATEWAY, SERVICES, TOKENIZER, WORKER
from shared.lifecycle import EXIT_CONFIG, EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE

QUESTION = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "Name the capital of France."}],
}


class Server:
    """One ``headrace serve`` with its folder for sockets."""

    def __init__(self, folder: pathlib.Path, *flags: str) -> None:
        self.port = claim_port("127.0.0.1", 0)
        self.url = base_url("127.0.0.1", self.port)
        self.folder = folder
        environ = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
        command = [sys.executable, "-P", "-m", "headrace", "serve", "demo", f"--port={self.port}", *flags]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, env=environ, stderr=self.log, stdin=subprocess.DEVNULL)

    def services(self) -> dict[str, int]:
        """Name and process id of the children, as ``ps`` shows them."""
        found = {}
        for pid in _children(self.process.pid):
            try:
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # Ended and reaped since it was listed.
            if words[1:3] == ["-P", "-m"]:
                name = next((word.removeprefix("--name=worker-") for word in words if word.startswith("--name=")), "0")
                found[words[3] if name == "0" else f"{words[3]}/{name}"] = pid
        return found

    def family(self) -> list[int]:
        """Every process below the launcher."""
        todo, found = [self.process.pid], []
        while todo:
            children = _children(todo.pop())
            found += children
            todo += children
        return found

    def answer(self) -> str:
        *_, last = wait_until_ready(self.url, 120)
        assert last.ready, self.text()
        return "".join(reply.text for reply in stream_chat(self.url, QUESTION))

    def text(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        self.log.close()


def _children(pid: int) -> list[int]:
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


_until = functools.partial(wait_until, seconds=60.0)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*flags: str) -> Server:
        servers.append(Server(tmp_path, *flags))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_answers_and_leaves_nothing_behind(start: Callable[..., Server]) -> None:
    server = start("--tokenizers=2")
    assert "Paris" in server.answer()
    assert set(server.services()) == set(SERVICES)
    family = server.family()
    assert len(family) >= 5
    server.process.terminate()
    assert server.process.wait(60) == EXIT_OK
    assert not any(map(_alive, family))
    assert not list(server.folder.glob("headrace-*"))
    text = server.text()
    stops = [text.index(f"{name} stopped") for name in (GATEWAY, TOKENIZER + "/0", ENGINE, WORKER)]
    assert stops == sorted(stops)
    assert "Traceback" not in text


def test_kill_9_of_the_launcher_leaves_no_orphan(start: Callable[..., Server]) -> None:
    server = start()
    assert "Paris" in server.answer()
    family = server.family()
    os.kill(server.services()[ENGINE], signal.SIGSTOP)
    server.process.kill()
    server.process.wait(60)
    _until(lambda: not any(map(_alive, family)))


def test_a_killed_service_is_started_again(start: Callable[..., Server]) -> None:
    server = start()
    assert "Paris" in server.answer()
    killed = server.services()
    os.kill(killed[TOKENIZER], signal.SIGKILL)
    _until(lambda: server.services().get(TOKENIZER) not in (None, killed[TOKENIZER]))
    assert "Paris" in server.answer()
    assert {name: pid for name, pid in server.services().items() if name != TOKENIZER} == {
        name: pid for name, pid in killed.items() if name != TOKENIZER
    }
    assert f"{TOKENIZER} was killed by SIGKILL; starting it again" in server.text()


def test_replicas_share_the_work_and_are_started_again_alone(start: Callable[..., Server]) -> None:
    server = start("--data-parallel-size=2")
    assert "Paris" in server.answer()
    before = server.services()
    assert set(before) == {*SERVICES, f"{WORKER}/1"}
    _until(lambda: server.text().count("is ready on cpu") == 2)
    os.kill(before[WORKER], signal.SIGKILL)
    assert "Paris" in server.answer()
    _until(lambda: server.services().get(WORKER) not in (None, before[WORKER]))
    _until(lambda: server.text().count("is ready on cpu") == 3)
    assert {name: pid for name, pid in server.services().items() if name != WORKER} == {
        name: pid for name, pid in before.items() if name != WORKER
    }
    assert f"{WORKER}/0 was killed by SIGKILL; starting it again" in server.text()
    server.process.terminate()
    assert server.process.wait(60) == EXIT_OK


@pytest.mark.parametrize(
    "service", [WORKER, *(pytest.param(name, marks=pytest.mark.slow) for name in SERVICES if name != WORKER)]
)
def test_a_stopped_service_is_killed_and_started_again(start: Callable[..., Server], service: str) -> None:
    server = start("--stuck-timeout=5")
    assert "Paris" in server.answer()
    before = server.services()
    os.kill(before[service], signal.SIGSTOP)
    _until(lambda: server.services().get(service) not in (None, before[service]))
    assert "Paris" in server.answer()
    assert {name for name, pid in server.services().items() if pid != before[name]} == {service}
    assert f"{service} gave no sign of life for 5 s and was killed" in server.text()


def test_removed_run_directory_is_made_again_under_a_stream(
    start: Callable[..., Server], tmp_path: pathlib.Path
) -> None:
    run_dir = tmp_path / "run"
    server = start("--stuck-timeout=5", "--batch-invariant", f"--run-dir={run_dir}")
    assert "Paris" in server.answer()
    before = server.services()
    long = QUESTION | {"max_tokens": 200, "ignore_eos": True}
    undisturbed = "".join(reply.text for reply in stream_chat(server.url, long))
    stream = stream_chat(server.url, long)
    text = next(stream).text
    # Renamed first: a heartbeat that is written again while files are removed one by one would keep the folder.
    shutil.rmtree(run_dir.rename(tmp_path / "removed"))
    assert text + "".join(reply.text for reply in stream) == undisturbed
    rebound = {TOKENIZER, ENGINE}
    _until(lambda: all(server.services().get(name) not in (None, before[name]) for name in rebound))
    assert "Paris" in server.answer()
    time.sleep(6)  # longer than a heartbeat may be missing
    after = server.services()
    assert {name for name in before if after[name] != before[name]} == rebound
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(
        ["lock", "engine.sock", "worker.sock", "tokenizer-0.sock", *(f"{name}.heartbeat" for name in SERVICES)]
    )
    assert server.text().count("was removed from outside while in use; made it again") == 1
    assert server.text().index(f"{ENGINE} cannot be reached") < server.text().index(f"{TOKENIZER} cannot be reached")
    server.process.terminate()
    assert server.process.wait(60) == EXIT_OK
    assert not list(run_dir.iterdir())


def test_running_request_is_answered_to_its_end_after_sigterm(start: Callable[..., Server]) -> None:
    server = start("--data-parallel-size=2", "--shutdown-timeout=120")
    assert "Paris" in server.answer()
    stream = stream_chat(server.url, QUESTION | {"max_tokens": 100, "ignore_eos": True})
    next(stream)
    server.process.terminate()
    *_, last = stream
    assert last.usage is not None
    assert last.usage["completion_tokens"] == 100
    assert server.process.wait(60) == EXIT_OK
    text = server.text()
    stops = [text.index(f"{name} stopped") for name in (GATEWAY, TOKENIZER, ENGINE, WORKER + "/0")]
    assert stops == sorted(stops)


def test_second_signal_ends_everything_now(start: Callable[..., Server]) -> None:
    server = start()
    assert "Paris" in server.answer()
    family = server.family()
    endless = QUESTION | {"max_tokens": 4000, "ignore_eos": True}
    stream = stream_chat(server.url, endless)
    next(stream)
    server.process.terminate()
    _until(lambda: "stopping (SIGTERM)" in server.text())
    assert server.process.poll() is None
    server.process.terminate()
    assert server.process.wait(60) == 128 + signal.SIGTERM
    _until(lambda: not any(map(_alive, family)))
    with pytest.raises(RequestFailed):
        list(stream)


def test_worker_that_always_dies_ends_the_server(start: Callable[..., Server]) -> None:
    server = start("--max-restarts=1")
    _until(lambda: WORKER in server.services())
    for _ in range(2):
        pid = server.services()[WORKER]
        os.kill(pid, signal.SIGKILL)
        _until(lambda pid=pid: server.process.poll() is not None or server.services().get(WORKER) not in (None, pid))
    assert server.process.wait(60) == EXIT_GAVE_UP
    assert f"{WORKER} was killed by SIGKILL; giving up after 1 restarts in 300 s" in server.text()


def run(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "headrace", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve", "demo", f"--port={port}", timeout_s=30)
    assert done.returncode == EXIT_CONFIG
    assert f"port {port} of 127.0.0.1 is in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_that_is_not_there_is_said_in_words() -> None:
    done = run("serve", "./no/such/model", "--port=0")
    assert done.returncode == EXIT_CONFIG
    assert "./no/such/model" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_that_a_service_refuses_ends_them_all(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF is not all there is")
    done = run("serve", str(tmp_path / "broken.gguf"), "--port=0", timeout_s=120)
    assert done.returncode == EXIT_CONFIG
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_flag() -> None:
    done = run("serve", "demo", "--max-num-seq=2")
    assert done.returncode == EXIT_USAGE
    assert "did you mean --max-num-seqs?" in done.stderr


def test_demo_asks_one_question_and_stops() -> None:
    command = [sys.executable, "-P", "-m", "headrace.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    assert "The capital of France is Paris" in done.stdout
    assert "tokens/s" in done.stdout
    assert done.stdout.endswith("Stopped.\n")
