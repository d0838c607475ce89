"""Shaping a row by looking only at its most probable tokens, where that is enough."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.min_p import MinP
from gpu_worker.sampling.most_probable import most_probable
from gpu_worker.sampling.temperature import Temperature
from gpu_worker.sampling.top_k import TopK
from gpu_worker.sampling.top_p import TopP

SIZES = (64, 256, 2048)
"""How many tokens are looked at, first of every row, then of those that need more. They are fixed, and multiples of
every vector's width, so that a row's values depend neither on its neighbours nor on where in memory it lies."""


class Shortlist(NamedTuple):
    """Rows whose surviving tokens are all known."""

    rows: Int64
    """[some] indices of these rows."""
    logits: torch.Tensor
    """[some, size] float32, shaped, in descending order."""
    ids: torch.Tensor
    """[some, size] int64."""


class Shortlister:
    """Applies the shapers to the most probable tokens of each row, if one of them cuts (min-p, top-k, top-p).

    When something is cut among them, all less probable tokens are cut too, and the row is settled: the survivors and
    their logits are those of the shapers' ``apply`` to the whole row. Which rows are settled is decided on the host, so
    this is for logits on the CPU, where looking at a value stops nothing.
    """

    def __init__(self, temperature: Temperature, min_p: MinP, top_k: TopK, top_p: TopP) -> None:
        self.temperature, self.min_p, self.top_k, self.top_p = temperature, min_p, top_k, top_p

    def settle(self, logits: torch.Tensor, rows: SampleRows) -> list[Shortlist]:
        """The rows that could be settled, each in one list.

        Args:
            logits: [rows, vocabulary] float32, unchanged.
        """
        left = np.flatnonzero(self.min_p.limits(rows) | self.top_k.limits(rows) | self.top_p.limits(rows))
        found: list[Shortlist] = []
        totals: torch.Tensor | None = None
        for size in SIZES:
            if not len(left) or logits.shape[1] < 2 * size:
                break
            some, chosen = logits if len(left) == len(logits) else logits[torch.from_numpy(left)], rows.select(left)
            values, ids = most_probable(some, size)
            self.temperature.apply(values, chosen)
            self.min_p.apply(values, chosen)
            self.top_k.apply_sorted(values, chosen)
            totals = self._totals(values, some, chosen) if totals is None else totals
            self.top_p.apply_sorted(values, chosen, totals)
            cut = values[:, -1].isneginf()
            settled = left[cut.numpy()]
            if len(settled) == len(left):
                return [*found, Shortlist(left, values, ids)]
            if len(settled):
                found.append(Shortlist(settled, values[cut], ids[cut]))
            left, totals = left[~cut.numpy()], totals[~cut]
        return found

    def _totals(self, values: torch.Tensor, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """[rows, 1] log of the sum of exp over what is left of each row before top-p.

        Args:
            values: the first ones of ``logits``, shaped so far.
        """
        totals = values.logsumexp(-1, keepdim=True)
        # Where nothing is cut yet, what top-p counts goes on beyond the first ones.
        uncut = np.flatnonzero(~values[:, -1].isneginf().numpy())
        if len(uncut) and self.top_p.limits(rows).any():
            chosen, others = torch.from_numpy(uncut), rows.select(uncut)
            whole = logits[chosen]
            for shaper in (self.temperature, self.min_p, self.top_k):
                shaper.apply(whole, others)
            # Of the largest logit and its log-probability: log_softmax takes half the time of logsumexp on a CPU.
            totals[chosen] = values[chosen, :1] - whole.log_softmax(-1).amax(-1, keepdim=True)
        return totals
