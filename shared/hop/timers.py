"""The times of a hop, and the clock that they are measured on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shared.errors import StartupError

Clock = Callable[[], float]
"""Seconds of the process's own running time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timers:
    """All in seconds; all but ``blip_s`` follow from the beat and the lease.

    Raises:
        StartupError: the lease is shorter than the time after which a request rests, so that requests would be dropped
            that somebody still renews.
    """

    beat_s: float = 1.0
    """A parent acknowledges all its requests once a beat, which renews their leases."""
    lease_s: float = 20.0
    """A child drops what nobody has renewed for this long. It is also the time in which a client may resume."""
    blip_s: float = 0.15
    """A connection that is back within this time was not lost: two live processes need 0.1 s at most
    (``shared.transport.RECONNECT_MS``)."""

    def __post_init__(self) -> None:
        if self.lease_s < self.orphan_s:
            raise StartupError(
                f"--lease-s {self.lease_s:g} is too short: with --beat-s {self.beat_s:g} it must be at least "
                f"{self.orphan_s:g}"
            )

    @property
    def silence_s(self) -> float:
        """A request whose child says nothing for this long moves to the next child."""
        return 5 * self.beat_s

    @property
    def orphan_s(self) -> float:
        """A request that nobody has renewed for this long is an orphan: it rests."""
        return 5 * self.beat_s

    @property
    def turn_s(self) -> float:
        """Between two repetitions of Turn."""
        return self.beat_s / 2

    @property
    def resync_s(self) -> float:
        """Between two resync demands of one request."""
        return self.beat_s / 4

    @property
    def retry_s(self) -> float:
        """Before a peer that could not be sent to is tried again."""
        return self.beat_s / 20


class RunningClock:
    """Running time: a process that was stopped does not count the time in which it could not act.

    Otherwise a process that wakes would at once believe that everybody else had been silent, and drop every lease.
    Any call moves the clock, by the time since the last call but at most ``largest_step_s``: call it, or whatever
    uses it, more often than that.
    """

    __slots__ = ("_largest", "_last", "_now", "_time")

    def __init__(self, time: Clock, largest_step_s: float = 0.5) -> None:
        self._time, self._largest = time, largest_step_s
        self._last, self._now = time(), 0.0

    def __call__(self) -> float:
        time = self._time()
        self._now += min(time - self._last, self._largest)
        self._last = time
        return self._now
