"""How many CPU threads the model may use: the cores of this machine less those that other processes keep busy.

Threads that share a core wait for each other at the end of every operation, so that two threads beside one busy process
are several times slower than one thread alone. Spinning while they wait for work, for a bounded time, makes short
operations faster. Imports no torch, so that the worker is heard of at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

INTERVAL_S = 0.25
TOLERATED = 0.6
"""Cores that others may keep busy before a thread is given up."""
RETURNED = 0.4
"""Cores that others may keep busy when a thread is taken back; lower, so that the number does not flap."""

_PROC_STAT = "/proc/stat"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_seconds() -> float:
    """Seconds of work that all processes together have done on this process's cores; 0 where nobody counts them."""
    try:
        with open(_PROC_STAT) as file:
            lines = [line.split() for line in file if line.startswith("cpu") and line[3].isdigit()]
    except OSError:
        return 0.0
    mine = os.sched_getaffinity(0)
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = sum(int(f[i]) for f in lines if int(f[0][3:]) in mine for i in (1, 2, 3, 6, 7, 8))
    return float(ticks) / os.sysconf("SC_CLK_TCK")


class ThreadGovernor:
    """Chooses the number of threads from what other processes used of the cores in the last interval.

    Args:
        fixed: the number that the user chose; None: it follows the load.
        cores: that this process may use.
    """

    def __init__(
        self,
        fixed: int | None,
        cores: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = busy_seconds,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        self._fixed, self._cores = fixed, cores
        self._clock, self._busy, self._own = clock, busy, own
        self._since, self._busy_before, self._own_before = clock(), busy(), own()
        self.threads = fixed or cores
        self.others = 0.0
        """Cores that other processes kept busy in the last interval."""

    def update(self) -> bool:
        """Look at the load if the last look is ``INTERVAL_S`` ago; whether ``threads`` changed."""
        now = self._clock()
        elapsed = now - self._since
        if self._fixed is not None or elapsed < INTERVAL_S:
            return False
        busy, own = self._busy(), self._own()
        self.others = max(0.0, (busy - self._busy_before - (own - self._own_before)) / elapsed)
        self._since, self._busy_before, self._own_before = now, busy, own
        before = self.threads
        self.threads = self._choose()
        return self.threads != before

    def _choose(self) -> int:
        fewest = self._fit(TOLERATED)
        most = self._fit(RETURNED)
        return min(max(self.threads, most), fewest)

    def _fit(self, margin: float) -> int:
        """Threads such that at most ``margin`` cores of the others' work falls on theirs."""
        overlap = max(0.0, self.others - margin)
        return max(1, self._cores - (int(overlap) + 1 if overlap > 0 else 0))
