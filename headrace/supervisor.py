"""Keeps a set of programs running: starts them, starts them again when they end, stops them in order.

One asyncio task per program. A program that ends while nobody asked it to is started again after a pause that grows;
one that ends with ``EXIT_CONFIG`` or ``EXIT_USAGE``, or more than ``MAX_RESTARTS`` times in ``RESTART_WINDOW_S``, ends
them all.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import structlog

from headrace.child_process import ChildProcess
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE, PARENT_VARIABLE
from shared.logging import get_logger

MAX_RESTARTS = 3
"""Restarts of one program within ``RESTART_WINDOW_S``; the next end of it is final."""
RESTART_WINDOW_S = 300.0
BACKOFF_S = (0.1, 1.0, 5.0)
"""Pause before the first, second and further restarts within the window."""
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


class Supervisor:
    """Runs ``programs`` until ``stop`` is called or one of them cannot be kept running.

    They are stopped in the order of ``programs``: the first has ended before the second gets its SIGTERM. Programs
    whose names are equal up to a ``/`` (replicas) are stopped together.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        max_restarts: int = MAX_RESTARTS,
        window_s: float = RESTART_WINDOW_S,
        backoff_s: Sequence[float] = BACKOFF_S,
        log: structlog.stdlib.BoundLogger | None = None,
    ) -> None:
        self._programs = list(programs)
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._backoff_s = backoff_s
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
        restarts: collections.deque[float] = collections.deque()
        while True:
            try:
                code = await self._run_once(program)
            except OSError as error:
                self._fail(EXIT_FAILURE, f"{program.name} cannot be started: {error}")
                return
            if code in (EXIT_CONFIG, EXIT_USAGE):
                self._fail(code, f"{program.name} cannot start; its message above says why")
                return
            now = time.monotonic()
            while restarts and restarts[0] < now - self._window_s:
                restarts.popleft()
            if len(restarts) == self._max_restarts:
                self._fail(
                    EXIT_GAVE_UP,
                    f"{program.name} {describe_exit(code)}; giving up after {self._max_restarts} restarts "
                    f"in {self._window_s:.0f} s",
                )
                return
            pause = self._backoff_s[min(len(restarts), len(self._backoff_s) - 1)]
            restarts.append(now)
            self._log.warning(
                f"{program.name} {describe_exit(code)}; starting it again in {pause:g} s "
                f"({len(restarts)} of {self._max_restarts})"
            )
            await asyncio.sleep(pause)

    async def _run_once(self, program: Program) -> int:
        process = ChildProcess(program.argv, {**program.environ, PARENT_VARIABLE: str(os.getpid())})
        self._running[program.name] = process
        self._log.debug(f"started {program.name}", pid=process.pid)
        code = await process.wait()
        del self._running[program.name]
        return code

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


def describe_exit(code: int) -> str:
    """``-9`` → ``was killed by SIGKILL``; ``1`` → ``ended with exit code 1``."""
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
