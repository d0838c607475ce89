"""What the device did and when, by events on its stream: how long each step took, and how long it waited before."""

from __future__ import annotations

import dataclasses
import time

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """The events of one step; readable once the step is done."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    before: torch.cuda.Event | None
    """The end of the step before; None: there was none."""

    @property
    def compute_s(self) -> float:
        """Seconds from the first launch of the step's own work to its end."""
        return _seconds(self.begin, self.end)

    @property
    def idle_s(self) -> float:
        """Seconds between the end of the step before and ``begin``: copies to the device, and waiting for the host."""
        return _seconds(self.before, self.begin) if self.before is not None else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class HostTimes:
    """The same where no GPU keeps events: the step ends when it was launched."""

    compute_s: float
    idle_s: float = 0.0


def stream_of_steps(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that is current now; None: the device has none. Asking for it takes longer than marking it."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class DeviceClock:
    """Marks steps on the stream that is current when it is made: ``begin``, then ``end``, for each step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_of_steps(device)
        self._begin: torch.cuda.Event | None = None
        self._last_end: torch.cuda.Event | None = None
        self._began = 0.0

    def begin(self) -> None:
        """What is launched from now on is the step's own work. The last call counts."""
        if self._stream is not None:
            self._begin = self._mark()
        else:
            self._began = time.perf_counter()

    def end(self) -> StepTimes | HostTimes:
        """All of the step's work has been launched."""
        if self._begin is None:
            return HostTimes(time.perf_counter() - self._began)
        times = StepTimes(self._begin, self._mark(), self._last_end)
        self._last_end = times.end
        return times

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000
