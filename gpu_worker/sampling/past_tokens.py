"""The tokens that rows already have, read from the slots' token ids whenever they are needed.

Nothing is counted from step to step: preemption, chunks, prefix hits and steps in flight cannot leave a wrong count
behind, and a row costs its length instead of a vocabulary of counters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import Int64, SampleRows


def prompt_and_output(rows: SampleRows, chosen: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    """All known tokens of some of the rows, one entry for each occurrence.

    Args:
        chosen: [some] indices of rows.

    Returns:
        [entries] int64 indices into ``chosen``, in order, and [entries] int64 token ids.
    """
    return _tokens(rows, chosen, np.zeros(len(chosen), np.int64), rows.num_tokens[chosen])


def output(rows: SampleRows, chosen: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``prompt_and_output``, for generated tokens only."""
    counts = rows.num_outputs[chosen]
    return _tokens(rows, chosen, rows.num_tokens[chosen] - counts, counts)


def penalised_output(
    logits: torch.Tensor, rows: SampleRows, by_slot: npt.NDArray[np.float32]
) -> tuple[Int64, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """What a penalty on generated tokens needs; None: no row has one and has generated something.

    Args:
        by_slot: [slots] penalty, 0: none.

    Returns:
        [some] indices of the penalised rows; then for each entry of ``output``: its index into them, its token id, and
        its penalty.
    """
    penalties = by_slot[rows.slots]
    chosen = np.flatnonzero((penalties != 0.0) & (rows.num_outputs > 0))
    if not len(chosen):
        return None
    row, ids = output(rows, chosen)
    return chosen, row, ids, torch.from_numpy(penalties[chosen]).to(logits.device)[row]


def _tokens(rows: SampleRows, chosen: Int64, starts: Int64, counts: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    device, total = rows.token_ids.device, int(counts.sum())
    # Entry e of row i is at position e - (entries before row i) of what is wanted from its slot.
    shifts = rows.slots[chosen] * rows.token_ids.shape[1] + starts - (np.cumsum(counts) - counts)
    shift, count = torch.from_numpy(np.stack([shifts, counts])).to(device)
    row = torch.repeat_interleave(torch.arange(len(chosen), device=device), count, output_size=total)
    places = torch.arange(total, device=device) + shift[row]
    return row, rows.token_ids.view(-1)[places].long()
