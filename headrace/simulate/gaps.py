"""Gaps between tokens, of which there are as many as tokens: counted, not kept."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

LEAST_S, PER_DOUBLING = 1e-5, 48
"""A bin is 1.5 % wide, so that a percentile is off by 0.7 % at most."""
NUM_BINS = 30 * PER_DOUBLING
"""Up to three hours."""


class GapHistogram:
    """Logarithmic bins; the mean is exact. Seconds."""

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_BINS, np.int64)
        self.total_s = 0.0

    def add(self, gaps: npt.NDArray[np.float64]) -> None:
        """Count gaps."""
        if not len(gaps):
            return
        self.total_s += float(gaps.sum())
        bins = (np.log2(np.maximum(gaps, LEAST_S) * (1 / LEAST_S)) * PER_DOUBLING).astype(np.intp)
        self.counts += np.bincount(np.minimum(bins, NUM_BINS - 1), minlength=NUM_BINS)

    @property
    def num(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return self.total_s / max(self.num, 1)

    def percentile(self, p: float) -> float:
        """The middle of the bin in which the ``p``-th percentile is; 0 if there are none."""
        if not self.num:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self.counts), math.ceil(self.num * p / 100) or 1))
        return float(LEAST_S * 2 ** ((index + 0.5) / PER_DOUBLING))

    def samples(self, most: int) -> list[float]:
        """As many gaps as there are, or ``most`` of them that are spread over the distribution evenly."""
        if not self.num:
            return []
        ranks = (np.arange(min(self.num, most)) + 0.5) * (self.num / min(self.num, most))
        bins = np.searchsorted(np.cumsum(self.counts), ranks)
        drawn: list[float] = (LEAST_S * np.exp2((bins + 0.5) / PER_DOUBLING)).tolist()
        return drawn
