"""How fast requests end, and so how long one that is refused should wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MEMORY_S = 30.0
"""Time constant: what ended longer ago counts less."""
LONGEST_S = 60


class Departures:
    """The rate at which requests end, as an exponentially weighted mean."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._at = clock()
        self._weight = 0.0

    def count(self) -> None:
        """A request has ended."""
        self._weight = self._decayed() + 1.0

    @property
    def rate(self) -> float:
        """Requests per second; 0 until one has ended."""
        # Until the memory is full it holds only what ended since the start.
        share = 1.0 - math.exp(-(self._clock() - self._started) / MEMORY_S)
        return self._decayed() / (MEMORY_S * share) if share > 0.0 else 0.0

    def wait_s(self, ahead: int) -> int:
        """Whole seconds in which ``ahead`` requests will have ended at this rate, 1 to ``LONGEST_S``."""
        rate = self.rate
        return min(max(math.ceil(ahead / rate), 1), LONGEST_S) if rate > 0.0 else 1

    def _decayed(self) -> float:
        now = self._clock()
        self._weight *= math.exp((self._at - now) / MEMORY_S)
        self._at = now
        return self._weight
