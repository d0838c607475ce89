"""top-p (Holtzman et al., 2019): ``-inf`` for tokens outside the nucleus, the smallest set of most probable tokens
whose probabilities reach p; those equal to the last of them stay too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.threshold import least_kept
from shared.messages import SlotInit


class TopP:
    def __init__(self, num_slots: int) -> None:
        self.top_p = np.ones(num_slots, np.float32)

    def add(self, request: SlotInit) -> None:
        self.top_p[request.slot] = request.params.top_p

    def limits(self, rows: SampleRows) -> npt.NDArray[np.bool_]:
        """[rows] which rows it may change."""
        return self.top_p[rows.slots] < 1.0

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        limited = np.flatnonzero(self.limits(rows))
        if not len(limited):
            return
        chosen = torch.from_numpy(limited).to(logits.device)
        some = logits[chosen]
        top_p = torch.from_numpy(self.top_p[rows.slots[limited]]).to(logits.device)[:, None]
        threshold = least_kept(some, some.softmax(-1), top_p)
        logits[chosen] = some.masked_fill_(some < threshold, -torch.inf)

    def apply_sorted(self, values: torch.Tensor, rows: SampleRows, total: torch.Tensor) -> None:
        """The same for the first logits of each row.

        Args:
            values: [rows, size] in descending order.
            total: [rows, 1] log of the sum of exp over the whole row.
        """
        limited = self.limits(rows)
        if not limited.any():
            return
        # A token stays while those before it add up to less than p.
        top_p = torch.from_numpy(np.where(limited, self.top_p[rows.slots], np.inf)).to(values.device)[:, None]
        probabilities = (values - total).exp_()
        kept = probabilities.cumsum(-1) - probabilities < top_p
        last = kept.sum(-1, keepdim=True).sub_(1).clamp_min_(0)
        values.masked_fill_(values < values.gather(1, last), -torch.inf)
