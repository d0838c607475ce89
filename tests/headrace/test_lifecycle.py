"""Exit codes, signals, the watch on the parent, the heartbeat, the watchdog and the health check."""

from __future__ import annotations

import http.server
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from shared import healthcheck
from shared.heartbeat import EXIT_STUCK, HEARTBEAT_VARIABLE, Heartbeat
from shared.lifecycle import (
    EXIT_CONFIG,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    FAILURE_VARIABLE,
    PARENT_VARIABLE,
)

SERVICE = """
import asyncio, os, sys, threading, time
from shared.errors import StartupError
from shared.heartbeat import Heartbeat, Watchdog
from shared.lifecycle import install_signal_handlers, run_service

def sync(settings):
    asked = threading.Event()
    install_signal_handlers(asked.set)
    print("up", flush=True)
    while not asked.is_set():
        time.sleep(0.01)
    print("stopping", flush=True)
    if settings.name == "slow":
        time.sleep(60)

def with_loop(settings):
    async def serve():
        asked = asyncio.Event()
        install_signal_handlers(asked.set, asyncio.get_running_loop())
        print("up", flush=True)
        await asked.wait()
        print("stopping", flush=True)
        if settings.name == "slow":
            await asyncio.sleep(60)
    asyncio.run(serve())

def early(settings):
    print("up", flush=True)
    time.sleep(60)

def finalizing(settings):
    class Slow:
        def __del__(self):
            print("up", flush=True)
            time.sleep(60)
    Slow()
    time.sleep(60)

def wedged(settings):
    heartbeat = Heartbeat()
    heartbeat.beat()
    print("up", flush=True)
    threading.Event().wait()

def turning(settings):
    Watchdog(1.0, every_s=0.1).start()
    heartbeat = Heartbeat(every_s=0.1)
    print("up", flush=True)
    while True:
        heartbeat.beat()
        time.sleep(0.05)

def computing(settings):
    Watchdog(1.0, every_s=0.1).start()
    heartbeat = Heartbeat()
    heartbeat.beat()
    with heartbeat.busy(limit_s=60):
        print("up", flush=True)
        while not os.path.exists(os.environ["ENOUGH"]):
            pass
    heartbeat.beat()
    print("done", flush=True)

def refuse(settings):
    raise StartupError("no such model: give another")

def crash(settings):
    raise KeyError("surprise")

run_service("core_engine", globals()[sys.argv.pop(1)])
"""


def start(kind: str, *flags: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, kind, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environ,
    )


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


def stop_and_age(process: subprocess.Popen[str], heartbeat: pathlib.Path) -> None:
    """SIGSTOP, and let its last sign of life be long ago."""
    process.send_signal(signal.SIGSTOP)
    threads = list(pathlib.Path(f"/proc/{process.pid}/task").glob("*/stat"))
    # Threads of these programs do not end.
    while any(thread.read_text().rsplit(")", 1)[1].split()[0] != "T" for thread in threads):
        time.sleep(0.01)
    os.utime(heartbeat, (0, 0))


@pytest.mark.parametrize("kind", ["sync", "with_loop", "early", "finalizing"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_is_an_orderly_stop(kind: str, signum: signal.Signals) -> None:
    with start(kind) as process:
        wait_for(process, "up")
        process.send_signal(signum)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == EXIT_OK
    assert output == ("" if kind in ("early", "finalizing") else "stopping\n")


@pytest.mark.parametrize("kind", ["sync", "with_loop"])
def test_second_signal_ends_at_once(kind: str) -> None:
    with start(kind, "--name=slow") as process:
        wait_for(process, "up")
        process.terminate()
        wait_for(process, "stopping")
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("kind", "flags", "code", "words"),
    [
        ("refuse", [], EXIT_CONFIG, "no such model: give another"),
        ("crash", [], EXIT_FAILURE, "KeyError: 'surprise'"),
        ("refuse", ["--max-num-seq=3"], EXIT_USAGE, "did you mean --max-num-seqs?"),
    ],
)
def test_exit_code_and_words(kind: str, flags: list[str], code: int, words: str) -> None:
    with start(kind, *flags) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert words in errors
    assert ("Traceback" in errors) == (kind == "crash")


def test_words_of_a_start_that_fails_are_left_in_a_file(tmp_path: pathlib.Path) -> None:
    words = tmp_path / "words"
    with start("refuse", **{FAILURE_VARIABLE: str(words)}) as process:
        process.communicate(timeout=20)
    assert words.read_text() == "no such model: give another"


def test_loop_that_stands_still_ends_its_process_and_says_where() -> None:
    with start("wedged", "--stuck-timeout=5") as process:
        wait_for(process, "up")
        _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_STUCK
    assert "the loop has stood still for" in errors
    assert "in wedged" in errors


def test_time_in_which_a_process_was_stopped_is_not_counted() -> None:
    with start("turning") as process:
        wait_for(process, "up")
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        time.sleep(1)
        assert process.poll() is None
        process.kill()


def test_busy_is_not_stuck(tmp_path: pathlib.Path) -> None:
    file, enough = tmp_path / "beat", tmp_path / "enough"
    with start("computing", **{HEARTBEAT_VARIABLE: str(file), "ENOUGH": str(enough)}) as process:
        wait_for(process, "up")
        assert file.read_text() == str(process.pid)
        renewals = set[int]()
        # The watchdog renews every 0.1 s, and would end a stuck process after 1 s.
        while len(renewals) < 20:
            renewals.add(file.stat().st_mtime_ns)
            assert process.poll() is None
            time.sleep(0.01)
        enough.touch()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_OK
    assert output == "done\n"


def test_healthcheck_ends_a_stopped_service(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "beat"
    with start("turning", **{HEARTBEAT_VARIABLE: str(file)}) as process:
        wait_for(process, "up")
        check = ["--file", str(file), "--max-age=60", "--kill-after=60"]
        assert healthcheck.main(check) == 0
        stop_and_age(process, file)
        assert healthcheck.main(check) == 1
        assert process.wait(20) == -signal.SIGKILL
    assert "was killed" in capsys.readouterr().err


def test_healthcheck_lets_one_live_that_beats_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthcheck, "LOOKS", 600)
    file = tmp_path / "beat"
    with start("turning", **{HEARTBEAT_VARIABLE: str(file)}) as process:
        wait_for(process, "up")
        stop_and_age(process, file)
        timer = threading.Timer(0.5, process.send_signal, (signal.SIGCONT,))
        timer.start()
        assert healthcheck.main(["--file", str(file), "--max-age=60", "--kill-after=60"]) == 1
        timer.join()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == EXIT_OK, "nothing else has ended it"


def test_child_of_another_parent_ends() -> None:
    with start("sync", **{PARENT_VARIABLE: "1"}) as process:
        process.communicate(timeout=20)
    assert process.returncode == EXIT_FAILURE


def test_heartbeat_is_written_at_most_once_per_interval(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "beat"
    beat = Heartbeat(str(file), every_s=1000.0)
    beat.beat()
    os.utime(file, (0, 0))
    beat.beat()
    assert file.stat().st_mtime == 0


def test_heartbeat_without_a_file_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    Heartbeat().beat()


def test_healthcheck_reads_the_heartbeat(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "beat"
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(file))
    assert healthcheck.main([]) == 1
    Heartbeat().beat()
    assert healthcheck.main([]) == 0
    old = time.time() - 60
    os.utime(file, (old, old))
    assert healthcheck.main([]) == 1


def test_healthcheck_without_a_file_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    assert healthcheck.main([]) == 1
    assert HEARTBEAT_VARIABLE in capsys.readouterr().err


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def test_healthcheck_asks_a_url(server: str) -> None:
    assert healthcheck.main(["--http", f"{server}/health"]) == 0
    assert healthcheck.main(["--http", f"{server}/ready"]) == 1


def test_healthcheck_of_a_dead_port() -> None:
    assert healthcheck.main(["--http", "http://127.0.0.1:9/health", "--timeout=1"]) == 1
