"""Keeps a set of programs running: starts them, starts them again when they end, stops them in order.

One asyncio task per program. A program that ends while nobody asked it to is started again after a pause that doubles;
one that ends with ``EXIT_CONFIG`` or ``EXIT_USAGE``, or once more than its restarts are allowed to be, ends them all. A
program that runs, but no longer renews its heartbeat file, is killed and started again; so is one whose sockets were
removed from outside, since nobody can connect to it any more.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import structlog

from headrace.child_process import ChildProcess
from headrace.run_dir import RunDir
from shared.config import Settings
from shared.errors import StartupError
from shared.heartbeat import EXIT_STUCK, HEARTBEAT_VARIABLE
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE, PARENT_VARIABLE
from shared.logging import get_logger

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before the first restart within the window, and before any; each pause is twice the one before."""
START_LIMIT_S = 120.0
"""A program that starts may take this long to its first sign of life. Before it can give one, Python has to read its
packages, which takes a second, or many where everything starts at once on a busy machine."""
CHECKS = 10
"""How often a heartbeat is looked at within the time that it may be missing."""
FOLDER_CHECK_S = 1.0
KILL_WAIT_S = 5.0
"""How long the kernel may take to end a process after SIGKILL before we go on without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program to keep running."""

    name: str
    """As the log calls it, such as ``core_engine``."""
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """Its whole environment."""
    grace_s: float = 10.0
    """Time from SIGTERM to SIGKILL at an orderly stop."""
    heartbeat: pathlib.Path | None = None
    """The file that it renews while it is well (``shared.heartbeat``)."""
    sockets: tuple[pathlib.Path, ...] = ()
    """Where it listens, in the file system."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a program is started again, in seconds where a time is meant."""

    max_restarts: int = 10
    """Restarts of one program within ``window_s``; its next end is final. More than the crashes that one request may
    cause before it is refused."""
    window_s: float = 300.0
    first_pause_s: float = FIRST_PAUSE_S
    stuck_timeout_s: float = 30.0
    """A program whose heartbeat is missing for this long is killed; 0: never."""
    start_limit_s: float = START_LIMIT_S
    """The same before the first heartbeat of a life, where it is more than ``stuck_timeout_s``."""

    @classmethod
    def of(cls, settings: Settings) -> RestartPolicy:
        """What the flags say."""
        return cls(settings.max_restarts, settings.restart_window, stuck_timeout_s=settings.stuck_timeout)

    def pause_s(self, restarts: int) -> float:
        """Before the next restart, after ``restarts`` within the window."""
        return min(self.first_pause_s * 2.0 ** min(restarts, 32), LONGEST_PAUSE_S)


class Supervisor:
    """Runs ``programs`` until ``stop`` is called or one of them cannot be kept running.

    They are stopped in the order of ``programs``: the first has ended before the second gets its SIGTERM. Programs
    whose names are equal up to a ``/`` (replicas) are stopped together.

    Args:
        run_dir: the folder of heartbeat files and sockets; it is made again when somebody removes it.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        policy: RestartPolicy | None = None,
        *,
        run_dir: RunDir | None = None,
        log: structlog.stdlib.BoundLogger | None = None,
    ) -> None:
        self._programs = list(programs)
        self._run_dir = run_dir
        self._restored = 0
        """How often the folder was made again."""
        self._folder_error: str | None = None
        self._bound: dict[str, int] = {}
        """The process of each program that had all its sockets, or may have had them in a folder that was removed."""
        self._unbound: set[str] = set()
        """Programs some of whose sockets were missing at the last look."""
        self._policy = policy or RestartPolicy()
        self._running: dict[str, ChildProcess] = {}
        self._ended: asyncio.Future[int] | None = None
        self._at_once: int | None = None
        self._log = log or get_logger()
        self.failure: str | None = None
        """Why the run ended when nobody asked for it, in words."""

    @property
    def stopping(self) -> bool:
        """True from the first ``stop``, or the first program that could not be kept running."""
        return self._ended is not None and self._ended.done()

    def pid(self, name: str) -> int | None:
        """Process id of a program, None while it is not running."""
        process = self._running.get(name)
        return None if process is None else process.pid

    def pids(self) -> dict[str, int]:
        """Process ids of the programs that run, by name."""
        return {name: process.pid for name, process in self._running.copy().items()}

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """End the run in order; called a second time: kill everything, and ``run`` returns 128 + ``signum``."""
        if self.stopping:
            self._log.warning("stopping at once")
            self._at_once = 128 + signum
            self.kill()
        self._finish(EXIT_OK)

    def kill(self) -> None:
        """SIGKILL to every program that runs."""
        for process in self._running.values():
            process.kill()

    async def run(self) -> int:
        """Start all programs at once and return an exit code of ``shared.lifecycle`` when all have ended."""
        self._ended = asyncio.get_running_loop().create_future()
        keepers = [asyncio.create_task(self._keep(program)) for program in self._programs]
        keepers.append(asyncio.create_task(self._keep_folder()))
        try:
            code = await self._ended
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            code = await self._stop_in_order(code)
            return code if self._at_once is None else self._at_once
        finally:
            self.kill()

    async def _keep(self, program: Program) -> None:
        policy = self._policy
        restarts: collections.deque[float] = collections.deque()
        while True:
            if not self._folder_is_there():
                self._fail(EXIT_CONFIG, f"{program.name} cannot be started: {self._folder_error}")
                return
            restored = self._restored
            try:
                code, what = await self._run_once(program)
            except OSError as error:
                self._fail(EXIT_FAILURE, f"{program.name} cannot be started: {error}")
                return
            # It may have started into a missing folder.
            if code in (EXIT_CONFIG, EXIT_USAGE) and self._folder_is_there() and restored == self._restored:
                self._fail(code, f"{program.name} cannot start; its message above says why")
                return
            now = time.monotonic()
            while restarts and restarts[0] < now - policy.window_s:
                restarts.popleft()
            if len(restarts) >= policy.max_restarts:
                self._fail(
                    EXIT_GAVE_UP,
                    f"{program.name} {what}; giving up after {policy.max_restarts} restarts in {policy.window_s:.0f} s",
                )
                return
            pause = policy.pause_s(len(restarts))
            restarts.append(now)
            self._log.warning(
                f"{program.name} {what}; starting it again in {pause:g} s ({len(restarts)} of {policy.max_restarts})"
            )
            await asyncio.sleep(pause)

    async def _run_once(self, program: Program) -> tuple[int, str]:
        """Start a program and wait for its end; its exit code, and what happened in words."""
        environ = {**program.environ, PARENT_VARIABLE: str(os.getpid())}
        if program.heartbeat is not None:
            environ[HEARTBEAT_VARIABLE] = str(program.heartbeat)
        process = ChildProcess(program.argv, environ)
        self._running[program.name] = process
        self._log.debug(f"started {program.name}", pid=process.pid)
        watch = asyncio.create_task(self._kill_when_stuck(process, program.heartbeat))
        try:
            code = await process.wait()
        finally:
            watch.cancel()
        del self._running[program.name]
        if watch.done() and not watch.cancelled():
            return code, f"gave no sign of life for {watch.result():g} s and was killed"
        return code, describe_exit(code)

    async def _kill_when_stuck(self, process: ChildProcess, heartbeat: pathlib.Path | None) -> float:
        """Return once a process has been killed because nobody has renewed its file for so many seconds.

        What counts is time in which this process ran itself: otherwise it would, when it wakes after both were stopped,
        blame the other.
        """
        stuck_s = self._policy.stuck_timeout_s
        if heartbeat is None or not stuck_s:
            never: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            return await never
        every_s, limit_s = stuck_s / CHECKS, max(stuck_s, self._policy.start_limit_s)
        seen, silent_s, before = _renewed_at(heartbeat), 0.0, time.monotonic()
        while silent_s < limit_s:
            await asyncio.sleep(every_s)
            now, stamp = time.monotonic(), _renewed_at(heartbeat)
            if stamp != seen or not heartbeat.parent.exists():
                silent_s = 0.0
            else:
                silent_s += min(now - before, 2 * every_s)
            if stamp not in (0, seen):
                limit_s = stuck_s
            seen, before = stamp, now
        process.kill()
        return limit_s

    async def _keep_folder(self) -> None:
        while True:
            if self._folder_is_there():
                self._rebind()
            await asyncio.sleep(FOLDER_CHECK_S)

    def _folder_is_there(self) -> bool:
        """Whether the run directory can be used, after it was made again where it was missing."""
        try:
            if self._run_dir is not None and self._run_dir.restore():
                self._restored += 1
                self._bound |= self.pids()
                self._log.warning(f"{self._run_dir.path} was removed from outside while in use; made it again")
        except StartupError as error:
            if str(error) != self._folder_error:
                self._folder_error = str(error)
                self._log.error(f"{error}; what runs goes on, but nothing can be started again")
            return False
        self._folder_error = None
        return True

    def _rebind(self) -> None:
        """Kill a program whose sockets were removed; the next one when this one can be reached again.

        From the back, so that each finds whom it connects to. A socket is missed at the second look: a program that
        starts replaces the file of the one before.
        """
        for program in reversed(self._programs):
            process = self._running.get(program.name)
            if all(path.exists() for path in program.sockets):
                self._unbound.discard(program.name)
                if process is not None:
                    self._bound[program.name] = process.pid
                continue
            if program.name in self._unbound and process is not None and self._bound.get(program.name) == process.pid:
                self._log.warning(f"{program.name} cannot be reached, its sockets were removed; killing it")
                process.kill()
            self._unbound.add(program.name)
            return

    async def _stop_in_order(self, code: int) -> int:
        groups: dict[str, list[Program]] = {}
        for program in self._programs:
            groups.setdefault(program.name.partition("/")[0], []).append(program)
        for group in groups.values():
            codes = await asyncio.gather(*(self._stop_one(program) for program in group))
            if code == EXIT_OK:
                code = next((c for c in codes if c != EXIT_OK), EXIT_OK)
        return code

    async def _stop_one(self, program: Program) -> int:
        process = self._running.get(program.name)
        if process is None:
            return EXIT_OK
        if self._at_once is not None:
            await self._reap(process)
            return EXIT_FAILURE
        process.terminate()
        try:
            code = await asyncio.wait_for(process.wait(), program.grace_s)
        except TimeoutError:
            self._log.warning(f"{program.name} did not stop within {program.grace_s:g} s; killing it")
            await self._reap(process)
            return EXIT_FAILURE
        del self._running[program.name]
        if code in (EXIT_OK, -signal.SIGTERM):
            self._log.info(f"{program.name} stopped")
            return EXIT_OK
        self._log.warning(f"{program.name} {describe_exit(code)} while stopping")
        return code if code > 0 else EXIT_FAILURE

    async def _reap(self, process: ChildProcess) -> None:
        process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_WAIT_S)

    def _fail(self, code: int, words: str) -> None:
        self._log.error(words)
        self.failure = self.failure or words
        self._finish(code)

    def _finish(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)


def _renewed_at(heartbeat: pathlib.Path) -> int:
    """When the file was renewed, in nanoseconds of the file system's clock; 0: not yet."""
    try:
        return heartbeat.stat().st_mtime_ns
    except OSError:
        return 0


def describe_exit(code: int) -> str:
    """``-9`` → ``was killed by SIGKILL``; ``1`` → ``ended with exit code 1``."""
    if code == EXIT_STUCK:
        return f"stood still and ended itself (exit code {code})"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def python_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs an installed module as a program; ``-P``: never one of the current folder."""
    return (sys.executable, "-P", "-m", module, *arguments)
