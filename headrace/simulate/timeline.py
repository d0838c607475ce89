"""What a simulation looked like over time: a row of numbers after each event, and their means in equal spans."""

from __future__ import annotations

import array
import enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from core_engine.pressure import Wait

Floats: TypeAlias = npt.NDArray[np.float64]


class Cause(enum.IntEnum):
    """Why the first of the waiting requests was not admitted: what the scheduler says, by what one would change."""

    NOBODY_WAITS = 0
    SEATS = 1
    """``--max-num-seqs`` run."""
    BLOCKS = 2
    """Too few free KV blocks, with what is always kept free and what is reserved for the growth of those that run."""
    STEP = 3
    """The next step has to be planned, and has to have tokens left for it."""


CAUSES: dict[Wait | None, Cause] = {
    None: Cause.NOBODY_WAITS,
    Wait.SEATS: Cause.SEATS,
    Wait.BLOCKS: Cause.BLOCKS,
    Wait.RESERVE: Cause.BLOCKS,
    Wait.WATERMARK: Cause.BLOCKS,
    Wait.LEAVING: Cause.BLOCKS,
    Wait.BUDGET: Cause.STEP,
    Wait.SHARED: Cause.STEP,
    Wait.PLACEMENT: Cause.STEP,
    Wait.SUSPECT: Cause.STEP,
    Wait.STEP: Cause.STEP,
    Wait.WORKER: Cause.STEP,
}

LEVELS = ("running", "waiting", "used_blocks")
"""Hold until the next row."""
COUNTERS = ("computed_tokens", "output_tokens", "preemptions", "finished")
"""Since the start."""
COLUMNS = ("time", *LEVELS, *COUNTERS, "cause")


class Timeline:
    """Rows of ``COLUMNS``; times never go back."""

    def __init__(self) -> None:
        self._values = array.array("d")

    def add(self, *values: float) -> None:
        """One row."""
        self._values.extend(values)

    def __len__(self) -> int:
        return len(self._values) // len(COLUMNS)

    def table(self) -> dict[str, Floats]:
        """By name, [rows]."""
        rows = np.frombuffer(self._values, np.float64).reshape(-1, len(COLUMNS))
        return {name: rows[:, index] for index, name in enumerate(COLUMNS)}

    def mean(self, name: str) -> float:
        """Of a level, by time."""
        table = self.table()
        spans = np.diff(table["time"])
        total = float(spans.sum())
        return float((table[name][:-1] * spans).sum() / total) if total else float(table[name][-1])

    def mean_while(self, name: str, cause: Cause) -> float:
        """Of a level, over the time in which ``cause`` held somebody up; 0 if it never did."""
        table = self.table()
        spans = np.diff(table["time"]) * (table["cause"][:-1] == cause)
        total = float(spans.sum())
        return float((table[name][:-1] * spans).sum() / total) if total else 0.0

    def cause_shares(self) -> dict[Cause, float]:
        """Share of the time for each cause."""
        table = self.table()
        spans, causes = np.diff(table["time"]), table["cause"][:-1].astype(np.intp)
        sums = np.bincount(causes, spans, minlength=len(Cause))
        return {cause: float(sums[cause] / max(sums.sum(), 1e-12)) for cause in Cause}

    def series(self, num_spans: int) -> dict[str, Floats]:
        """Equal spans of the whole time: ``edges`` [spans + 1], means of the levels and rates of the counters."""
        table = self.table()
        time = table["time"]
        edges = np.linspace(time[0], max(time[-1], time[0] + 1e-9), num_spans + 1)
        width = edges[1] - edges[0]
        found = {"edges": edges}
        for name in LEVELS:
            integral = np.concatenate([[0.0], np.cumsum(table[name][:-1] * np.diff(time))])
            found[name] = np.diff(np.interp(edges, time, integral)) / width
        for name in COUNTERS:
            found[name] = np.diff(np.interp(edges, time, table[name])) / width
        return found
