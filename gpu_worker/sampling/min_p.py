"""min-p (Nguyen et al., 2024): tokens less probable than ``min_p`` times the most probable one are masked."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from shared.messages import SlotInit


class MinP:
    def __init__(self, num_slots: int) -> None:
        self.log_min_p = np.full(num_slots, -np.inf, np.float32)

    def add(self, request: SlotInit) -> None:
        min_p = request.params.min_p
        self.log_min_p[request.slot] = np.log(min_p) if min_p > 0 else -np.inf

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        log_min_p = self.log_min_p[rows.slots]
        if np.isneginf(log_min_p).all():
            return
        threshold = logits.amax(-1, keepdim=True) + torch.from_numpy(log_min_p).to(logits.device)[:, None]
        logits.masked_fill_(logits < threshold, -torch.inf)
