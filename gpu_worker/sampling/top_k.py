"""top-k: only the k most probable tokens stay, and those equal to the last of them."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from shared.messages import SlotInit


class TopK:
    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.top_k: Int64 = np.full(num_slots, vocab_size, np.int64)

    def add(self, request: SlotInit) -> None:
        top_k = request.params.top_k
        self.top_k[request.slot] = min(top_k, self.vocab_size) if top_k > 0 else self.vocab_size

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        top_k = self.top_k[rows.slots]
        limited = np.flatnonzero(top_k < self.vocab_size)
        if not len(limited):
            return
        chosen = torch.from_numpy(limited).to(logits.device)
        last = torch.from_numpy(top_k[limited] - 1).to(logits.device)[:, None]
        some = logits[chosen]
        threshold = some.topk(int(top_k[limited].max()), -1).values.gather(1, last)
        logits[chosen] = some.masked_fill_(some < threshold, -torch.inf)
