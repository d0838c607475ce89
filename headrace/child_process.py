"""A child process that any event loop, in any thread, can wait for."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence


class ChildProcess:
    """A started program, in a process group of its own: Ctrl-C in a terminal does not reach it.

    asyncio's own subprocesses need a child watcher, which is the business of the program that we are part of. Call it
    in a running event loop.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, process_group=0)
        self._waiting = asyncio.ensure_future(self._wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal that killed it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and return the exit code. A caller that is cancelled disturbs no other."""
        return await asyncio.shield(self._waiting)

    def terminate(self) -> None:
        """SIGTERM; nothing if it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL; nothing if it has ended."""
        self._process.kill()

    async def _wait(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # not this system, or too old a kernel
            return await asyncio.to_thread(self._process.wait)
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._process.wait()
