"""Whether a process's loop turns: signs of life that others read, and a watchdog that ends a process without them.

A process that computes for minutes is busy, one whose loop waits for something that never comes is stuck. The loop says
that it turns (``Heartbeat.beat``), and announces what may take long (``Heartbeat.busy``), for which it has until a time
that it names. The watchdog's thread renews the heartbeat file meanwhile, so that the file's age tells a reader the same
story: a stopped, wedged or frozen process renews nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

HEARTBEAT_VARIABLE = "HEADRACE_HEARTBEAT_FILE"
"""Names the heartbeat file; without it none is written."""
EXIT_STUCK = 75
"""The loop stood still, and the process ended itself. Starting again may help (``EX_TEMPFAIL``)."""
START_LIMIT_S = 600.0
"""How long a process may take to the first turn of its loop."""
BEAT_S = 1.0
LAST_WORDS_S = 2.0
"""How long the stacks of a stuck process may take to be written: standard error may be what it is stuck at."""


class _Signs:
    """What the loop of this process has said; written by the loop, read by the watchdog."""

    def __init__(self) -> None:
        self.turns = 0
        self.busy_until = 0.0
        """Until then (``time.monotonic``) the loop need not turn."""


_signs = _Signs()


class Heartbeat:
    """The sign of life that launchers, watchdogs and ``python -m shared.healthcheck`` read: a file that is renewed.

    A service's own loop calls ``beat`` at every turn, never a helper thread, so that a fresh file says that the loop
    turns. The file holds the process id. Without ``HEADRACE_HEARTBEAT_FILE`` nothing is written.
    """

    def __init__(self, path: str | None = None, *, every_s: float = BEAT_S) -> None:
        self._path = path or os.environ.get(HEARTBEAT_VARIABLE)
        self._every_s = every_s
        self._next = 0.0

    def beat(self) -> None:
        """Renew the file if ``every_s`` seconds have passed since the last time. Costs a clock reading otherwise."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            _signs.turns += 1
            _signs.busy_until = 0.0
            _renew(self._path)

    @contextlib.contextmanager
    def busy(self, limit_s: float) -> Iterator[None]:
        """Around work during which the loop does not turn, and which takes ``limit_s`` seconds at most."""
        _signs.busy_until = time.monotonic() + limit_s
        try:
            yield
        finally:
            _signs.turns += 1
            _signs.busy_until = 0.0


class Watchdog:
    """A thread that ends this process with ``EXIT_STUCK`` when its loop has stood still for ``limit_s`` seconds.

    Time in which the process itself did not run (SIGSTOP, a frozen container, a suspended machine) does not count: it
    goes on where it was. Nothing is due before the loop's first turn, for ``START_LIMIT_S``.

    Args:
        limit_s: 0: the process is never ended; the file is renewed all the same while it is busy.
        leave: ends the process.
    """

    def __init__(
        self, limit_s: float, *, every_s: float = BEAT_S, leave: Callable[[float], None] | None = None
    ) -> None:
        self._limit_s = limit_s
        self._every_s = min(every_s, limit_s / 4) if limit_s else every_s
        self._leave = leave or _leave
        self._path = os.environ.get(HEARTBEAT_VARIABLE)

    def start(self) -> None:
        """Begin to watch, with the process busy starting."""
        _signs.busy_until = time.monotonic() + START_LIMIT_S
        if self._path is not None:
            with contextlib.suppress(OSError):
                _write(self._path)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        still_s, turns, before = 0.0, _signs.turns, time.monotonic()
        while True:
            time.sleep(self._every_s)
            now = time.monotonic()
            # A longer pause than was asked for is not the loop's fault: nothing in this process ran.
            still_s += min(now - before, 2 * self._every_s)
            before = now
            if now < _signs.busy_until:
                _renew(self._path)
                still_s = 0.0
            elif turns != _signs.turns:
                still_s = 0.0
            turns = _signs.turns
            if self._limit_s and still_s >= self._limit_s:
                self._leave(still_s)
                return


def _renew(path: str | None) -> None:
    if path is None:
        return
    with contextlib.suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            _write(path)


def _write(path: str) -> None:
    pathlib.Path(path).write_text(str(os.getpid()), encoding="ascii")


def _leave(still_s: float) -> None:
    final = threading.Timer(LAST_WORDS_S, os._exit, (EXIT_STUCK,))
    final.daemon = True
    final.start()
    # Not through the log, whose lock the stuck thread may hold.
    words = f"the loop has stood still for {still_s:.0f} s; ending, to be started again. Where its threads stand:\n"
    os.write(sys.stderr.fileno(), words.encode())
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STUCK)
