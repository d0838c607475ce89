"""top-k: ``-inf`` for tokens less probable than the k-th most probable one (``transformers.TopKLogitsWarper``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.threshold import least_kept
from shared.messages import SlotInit


class TopK:
    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.top_k: Int64 = np.full(num_slots, vocab_size, np.int64)

    def add(self, request: SlotInit) -> None:
        top_k = request.params.top_k
        self.top_k[request.slot] = min(top_k, self.vocab_size) if top_k > 0 else self.vocab_size

    def limits(self, rows: SampleRows) -> npt.NDArray[np.bool_]:
        """[rows] which rows it may change."""
        return self.top_k[rows.slots] < self.vocab_size

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        limited = np.flatnonzero(self.limits(rows))
        if not len(limited):
            return
        chosen = torch.from_numpy(limited).to(logits.device)
        some = logits[chosen]
        top_k = torch.from_numpy(self.top_k[rows.slots[limited]]).to(logits.device)[:, None]
        threshold = least_kept(some, torch.ones_like(some), top_k.float())
        logits[chosen] = some.masked_fill_(some < threshold, -torch.inf)

    def apply_sorted(self, values: torch.Tensor, rows: SampleRows) -> None:
        """The same for the first logits of each row, [rows, size] in descending order."""
        limited = self.limits(rows)
        if not limited.any():
            return
        top_k = np.where(limited, np.minimum(self.top_k[rows.slots], values.shape[1]), values.shape[1])
        last = torch.from_numpy(top_k - 1).to(values.device)[:, None]
        values.masked_fill_(values < values.gather(1, last), -torch.inf)
