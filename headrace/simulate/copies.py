"""When copies between a device and its host are complete."""

from __future__ import annotations

from collections import deque

import numpy as np

from core_engine.host_memory import HostMemorySpec
from shared.messages import Step


class Copies:
    """Of one replica: each direction does one step's after the other, beside what is computed."""

    def __init__(self, host: HostMemorySpec) -> None:
        self._seconds = [host.block_bytes / rate if rate else 0.0 for rate in host.rates]
        self._free_at = [0.0, 0.0]
        self._pending: deque[tuple[int, float]] = deque()

    def start(self, step: Step, now: float) -> float:
        """Returns when those of the step are complete, and all before them."""
        for direction, count in enumerate(np.bincount(step.transfers[:, 0], minlength=2).tolist()):
            if count:
                self._free_at[direction] = max(self._free_at[direction], now) + count * self._seconds[direction]
        end = max(*self._free_at, now)
        if len(step.transfers):
            self._pending.append((step.number, end))
        return end

    def complete(self, number: int, now: float) -> int:
        """``StepResult.transferred`` of the result of step ``number``."""
        while self._pending and self._pending[0][1] <= now:
            self._pending.popleft()
        return min(number, self._pending[0][0] - 1) if self._pending else number
