"""How long an engine that has work has settled nothing."""

from __future__ import annotations

from core_engine.core import EngineCore
from shared.hop.timers import Clock
from shared.messages import Epoch


class StallWatch:
    """Busy is not stuck: every settled step is progress, each chunk of a long prompt too.

    Args:
        clock: the process's running time, so that an engine that was itself stopped does not count that time.
    """

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._since = clock()
        self._seen: tuple[int, list[Epoch]] = (0, [])

    def stalled_s(self) -> float:
        """Seconds without progress in spite of work for a ready worker; 0 when idle. Call it several times a beat."""
        core, now = self._core, self._clock()
        is_busy = bool(core.replicas) and (len(core.waiting) > 0 or any(r.num_running for r in core.replicas))
        seen = (core.steps_settled, [replica.epoch for replica in core.replicas])
        if not is_busy or seen != self._seen:
            self._since, self._seen = now, seen
        return now - self._since
