"""Supervision, with small real programs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from headrace.supervisor import Program, Supervisor, describe_exit
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_GAVE_UP, EXIT_OK

SERVE = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
def note(word):
    with log.open("a") as file:
        file.write(f"{sys.argv[2]} {word}\\n")
def leave(*_):
    note("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
note("started")
while True:
    time.sleep(0.05)
"""
DEAF = SERVE.replace("signal.signal(signal.SIGTERM, leave)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def program(name: str, log: pathlib.Path, code: str = SERVE, grace_s: float = 10.0) -> Program:
    return Program(name, (sys.executable, "-c", code, str(log), name), dict(os.environ), grace_s)


def lines(log: pathlib.Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[int]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        if not task.done():
            supervisor.stop()
        await task


@pytest.fixture
def log(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "log"


def test_stops_in_order_and_returns_ok(log: pathlib.Path) -> None:
    async def scenario() -> int:
        names = ["first", "second/0", "second/1", "third"]
        supervisor = Supervisor([program(name, log) for name in names])
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 4)
            supervisor.stop()
            return await task

    assert asyncio.run(scenario()) == EXIT_OK
    stops = [line.split()[0] for line in lines(log) if line.endswith("stopped")]
    assert stops[0] == "first"
    assert sorted(stops[1:3]) == ["second/0", "second/1"]
    assert stops[3] == "third"


def test_killed_program_is_started_again(log: pathlib.Path) -> None:
    async def scenario() -> int:
        supervisor = Supervisor([program("a", log), program("b", log)], backoff_s=(0.01,))
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 2)
            first = supervisor.pid("a")
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until(lambda: lines(log).count("a started") == 2)
            assert supervisor.pid("a") not in (None, first)
            supervisor.stop()
            return await task

    assert asyncio.run(scenario()) == EXIT_OK
    assert lines(log).count("b started") == 1


def test_gives_up_after_the_cap_and_stops_the_others(log: pathlib.Path) -> None:
    crash = SERVE.replace("while True:", "sys.exit(1)\nwhile True:")

    async def scenario() -> int:
        supervisor = Supervisor([program("good", log), program("bad", log, crash)], max_restarts=2, backoff_s=(0.01,))
        return await supervisor.run()

    assert asyncio.run(scenario()) == EXIT_GAVE_UP
    assert lines(log).count("bad started") == 3


def test_configuration_error_is_final(log: pathlib.Path) -> None:
    refuse = SERVE.replace("while True:", f"sys.exit({EXIT_CONFIG})\nwhile True:")

    async def scenario() -> int:
        return await Supervisor([program("good", log), program("bad", log, refuse)]).run()

    assert asyncio.run(scenario()) == EXIT_CONFIG
    assert lines(log).count("bad started") == 1


def test_program_that_does_not_exist_ends_the_run(log: pathlib.Path) -> None:
    supervisor = Supervisor([Program("missing", (str(log / "nothing"),), {})])
    assert asyncio.run(supervisor.run()) == EXIT_FAILURE
    assert supervisor.failure is not None
    assert "missing cannot be started" in supervisor.failure


def test_runs_in_any_thread_and_on_any_event_loop(log: pathlib.Path) -> None:
    async def scenario() -> int:
        supervisor = Supervisor([program("a", log)])
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 1)
            supervisor.stop()
            return await task

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            codes.append(runner.run(scenario()))

    codes: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert codes == [EXIT_OK]


def test_deaf_program_is_killed_at_its_time_limit(log: pathlib.Path) -> None:
    async def scenario() -> int:
        supervisor = Supervisor([program("deaf", log, DEAF, grace_s=0.1), program("good", log)])
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 2)
            supervisor.stop()
            return await task

    assert asyncio.run(scenario()) == EXIT_FAILURE
    assert lines(log)[-1] == "good stopped"


def test_second_stop_is_at_once(log: pathlib.Path) -> None:
    async def scenario() -> int:
        supervisor = Supervisor([program("deaf", log, DEAF, grace_s=60), program("good", log)])
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 2)
            pids = [supervisor.pid("deaf"), supervisor.pid("good")]
            supervisor.stop(signal.SIGINT)
            await asyncio.sleep(0.05)
            supervisor.stop(signal.SIGINT)
            code = await asyncio.wait_for(task, 10)
            await until(lambda: not any(pid and alive(pid) for pid in pids))
            return code

    assert asyncio.run(scenario()) == 128 + signal.SIGINT


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (78, "exit code 78"), (-9, "SIGKILL"), (-64, "SIGRTMAX"), (-200, "signal 200")],
)
def test_describe_exit(code: int, words: str) -> None:
    assert words in describe_exit(code)
