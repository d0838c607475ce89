"""Masking named tokens without leaving a row empty."""

from __future__ import annotations

import torch


def mask_ids(logits: torch.Tensor, row: torch.Tensor, ids: torch.Tensor, which: torch.Tensor | None = None) -> None:
    """Mask the given places of ``logits`` [rows, vocabulary] in place, except in a row that would have no token left.

    There the rules of a request contradict each other, and what was masked before stays masked.

    Args:
        row: [entries] int64; an entry may come twice.
        ids: [entries] int64.
        which: [entries] bool, the entries that count; None: all.
    """
    before = logits[row, ids]
    # Added and not assigned: of two entries for one place only one may count, in either order.
    added = torch.full_like(before, -torch.inf)
    logits.index_put_((row, ids), added if which is None else added.masked_fill_(~which, 0.0), accumulate=True)
    left = logits.amax(-1) > -torch.inf
    logits[row, ids] = torch.where(left[row], logits[row, ids], before)
