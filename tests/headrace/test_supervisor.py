"""Supervision, with small real programs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from headrace.run_dir import RunDir
from headrace.supervisor import LONGEST_PAUSE_S, Program, RestartPolicy, Supervisor, describe_exit
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

BEATING = SERVE.replace("time.sleep(0.05)", "time.sleep(0.05)\n    pathlib.Path(sys.argv[3]).touch()")
QUICK = RestartPolicy(max_restarts=2, first_pause_s=0.01, stuck_timeout_s=3.0)


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
        supervisor = Supervisor([program("a", log), program("b", log)], QUICK)
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
        supervisor = Supervisor([program("good", log), program("bad", log, crash)], QUICK)
        code = await supervisor.run()
        assert supervisor.failure == "bad ended with exit code 1; giving up after 2 restarts in 300 s"
        return code

    assert asyncio.run(scenario()) == EXIT_GAVE_UP
    assert lines(log).count("good started") == 1
    assert lines(log).count("bad started") == 3


def test_configuration_error_is_final(log: pathlib.Path) -> None:
    refuse = SERVE.replace("while True:", f"sys.exit({EXIT_CONFIG})\nwhile True:")

    async def scenario() -> int:
        return await Supervisor([program("good", log), program("bad", log, refuse)]).run()

    assert asyncio.run(scenario()) == EXIT_CONFIG
    assert lines(log).count("bad started") == 1


def test_pauses_double_up_to_a_limit() -> None:
    policy = RestartPolicy(first_pause_s=0.1)
    assert [policy.pause_s(restarts) for restarts in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert policy.pause_s(10_000) == LONGEST_PAUSE_S


def beating(name: str, log: pathlib.Path, file: pathlib.Path, code: str = BEATING) -> Program:
    found = program(name, log, code)
    return dataclasses.replace(found, argv=(*found.argv, str(file)), heartbeat=file)


def test_stopped_program_is_killed_and_started_again(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def scenario() -> int:
        programs = [beating(name, log, tmp_path / name) for name in ("well", "stopped")]
        supervisor = Supervisor(programs, QUICK)
        async with running(supervisor) as task:
            await until(lambda: all((tmp_path / name).exists() for name in ("well", "stopped")))
            pids = {name: supervisor.pid(name) for name in ("well", "stopped")}
            assert pids["stopped"] is not None
            os.kill(pids["stopped"], signal.SIGSTOP)
            await until(lambda: lines(log).count("stopped started") == 2)
            assert not alive(pids["stopped"])
            assert supervisor.pid("well") == pids["well"]
            supervisor.stop()
            return await task

    assert asyncio.run(scenario()) == EXIT_OK
    assert lines(log).count("well started") == 1


def test_program_that_goes_on_in_time_is_left_alone(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def scenario() -> int:
        supervisor = Supervisor(
            [beating("a", log, tmp_path / "a")], dataclasses.replace(QUICK, stuck_timeout_s=5.0, max_restarts=0)
        )
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 1)
            pid = supervisor.pid("a")
            assert pid is not None
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, signum)
                await asyncio.sleep(1.0)
            assert supervisor.pid("a") == pid
            supervisor.stop()
            return await task

    assert asyncio.run(scenario()) == EXIT_OK


def test_programs_that_never_beat_run_out_of_restarts(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    policy = dataclasses.replace(QUICK, max_restarts=1, stuck_timeout_s=0.5, start_limit_s=1.0)
    supervisor = Supervisor([beating("mute", log, tmp_path / "mute", SERVE)], policy)
    assert asyncio.run(supervisor.run()) == EXIT_GAVE_UP
    assert supervisor.failure == "mute gave no sign of life for 1 s and was killed; giving up after 1 restarts in 300 s"


@pytest.mark.parametrize("lives", [1, 2])
def test_program_that_starts_slowly_is_not_taken_for_stuck(
    log: pathlib.Path, tmp_path: pathlib.Path, lives: int
) -> None:
    """Also when the file of an earlier life is still there."""
    slow = BEATING.replace('note("started")', 'time.sleep(1.5)\nnote("started")')

    async def scenario() -> int:
        policy = dataclasses.replace(QUICK, stuck_timeout_s=0.5)
        supervisor = Supervisor([beating("slow", log, tmp_path / "slow", slow)], policy)
        async with running(supervisor) as task:
            for life in range(1, lives + 1):
                await until(lambda life=life: len(lines(log)) == life)  # type: ignore[misc]
                if life < lives:
                    os.kill(supervisor.pids()["slow"], signal.SIGKILL)
            supervisor.stop()
            return await task

    (tmp_path / "slow").touch()
    assert asyncio.run(scenario()) == EXIT_OK
    assert lines(log).count("slow started") == lives


LISTEN = SERVE.replace(
    'note("started")',
    """
import socket
listener = socket.socket(socket.AF_UNIX)
try:
    pathlib.Path(sys.argv[3]).unlink(missing_ok=True)
    listener.bind(sys.argv[3])
except OSError:
    sys.exit(78)
note("started")
""",
)
"""Ends as one does that cannot work as configured, where the folder of its socket is missing."""


def listening(name: str, log: pathlib.Path, run_dir: RunDir, code: str = LISTEN) -> Program:
    file = run_dir.path / f"{name}.sock"
    found = program(name, log, code)
    return dataclasses.replace(found, argv=(*found.argv, str(file)), sockets=(file,))


def test_programs_bind_their_sockets_again_from_the_back(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def scenario() -> int:
        run_dir = RunDir(str(tmp_path / "run"))
        programs = [program("front", log), *(listening(name, log, run_dir) for name in ("middle", "back"))]
        supervisor = Supervisor(programs, RestartPolicy(first_pause_s=0.01), run_dir=run_dir)
        async with running(supervisor) as task:
            for times in (1, 2, 3):
                for name in ("front", "middle", "back"):
                    wanted = 1 if name == "front" else times
                    await until(lambda name=name, n=wanted: lines(log).count(f"{name} started") == n)  # type: ignore[misc]
                if times < 3:
                    shutil.rmtree(run_dir.path)
            supervisor.stop()
            code = await task
        run_dir.close()
        return code

    assert asyncio.run(scenario()) == EXIT_OK
    assert lines(log).count("front started") == 1
    assert [line for line in lines(log) if "started" in line][-4:] == ["back started", "middle started"] * 2


def test_program_that_starts_into_a_missing_folder_is_started_again(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def scenario() -> int:
        run_dir = RunDir(str(tmp_path / "run"))
        late = listening("late", log, run_dir, f"import time; time.sleep(0.5)\n{LISTEN}")
        supervisor = Supervisor([late], QUICK, run_dir=run_dir)
        async with running(supervisor) as task:
            await until(lambda: supervisor.pid("late") is not None)
            shutil.rmtree(run_dir.path)
            await until(lambda: lines(log) == ["late started"])
            supervisor.stop()
            code = await task
        run_dir.close()
        return code

    assert asyncio.run(scenario()) == EXIT_OK


def test_nothing_is_started_in_a_folder_that_another_launcher_took(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def scenario() -> int:
        run_dir = RunDir(str(tmp_path / "run"))
        supervisor = Supervisor([program("a", log), program("b", log)], QUICK, run_dir=run_dir)
        async with running(supervisor) as task:
            await until(lambda: len(lines(log)) == 2)
            shutil.rmtree(run_dir.path)
            other = RunDir(str(run_dir.path))
            await asyncio.sleep(2.5)
            assert not task.done(), "what runs goes on"
            os.kill(supervisor.pids()["a"], signal.SIGKILL)
            code = await task
        other.close()
        assert supervisor.failure is not None
        assert "another headrace serve uses it now" in supervisor.failure
        return code

    assert asyncio.run(scenario()) == EXIT_CONFIG
    assert lines(log).count("a started") == 1
    assert "b stopped" in lines(log)


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
    [
        (0, "exit code 0"),
        (78, "exit code 78"),
        (75, "stood still"),
        (-9, "SIGKILL"),
        (-64, "SIGRTMAX"),
        (-200, "signal 200"),
    ],
)
def test_describe_exit(code: int, words: str) -> None:
    assert words in describe_exit(code)
