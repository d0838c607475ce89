"""min-p (Nguyen et al., 2024): ``-inf`` for tokens less probable than ``min_p`` times the most probable one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import SampleRows
from shared.messages import SlotInit


class MinP:
    def __init__(self, num_slots: int) -> None:
        self.log_min_p = np.full(num_slots, -np.inf, np.float32)

    def add(self, request: SlotInit) -> None:
        min_p = request.params.min_p
        self.log_min_p[request.slot] = np.log(min_p) if min_p > 0 else -np.inf

    def limits(self, rows: SampleRows) -> npt.NDArray[np.bool_]:
        """[rows] which rows it may change."""
        return self.log_min_p[rows.slots] > -np.inf

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        if not self.limits(rows).any():
            return
        log_min_p = torch.from_numpy(self.log_min_p[rows.slots]).to(logits.device)[:, None]
        threshold = logits.amax(-1, keepdim=True) + log_min_p
        logits.masked_fill_(logits < threshold, -torch.inf)
