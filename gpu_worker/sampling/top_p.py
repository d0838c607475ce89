"""top-p (Holtzman et al., 2019): the smallest set of most probable tokens whose probabilities reach p stays."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from shared.messages import SlotInit

FIRST_LOOK = 1024
"""Most probable tokens that are looked at before a whole row is sorted, which costs thirty times as much."""


class TopP:
    def __init__(self, num_slots: int) -> None:
        self.top_p = np.ones(num_slots, np.float32)

    def add(self, request: SlotInit) -> None:
        self.top_p[request.slot] = request.params.top_p

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        top_p = self.top_p[rows.slots]
        limited = np.flatnonzero(top_p < 1.0)
        if not len(limited):
            return
        chosen = torch.from_numpy(limited).to(logits.device)
        some = logits[chosen]
        threshold = _thresholds(some, torch.from_numpy(top_p[limited]).to(logits.device)[:, None])
        logits[chosen] = some.masked_fill_(some < threshold, -torch.inf)


def _thresholds(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the least logit that stays. A token stays while those before it add up to less than p."""
    vocab_size = logits.shape[1]
    log_probabilities = logits.log_softmax(-1)
    normaliser = (logits - log_probabilities).nan_to_num_(-torch.inf).amax(-1, keepdim=True)
    for size in (min(FIRST_LOOK, vocab_size), vocab_size):
        values = logits.topk(size, -1).values if size < vocab_size else logits.sort(-1, descending=True).values
        probabilities = (values - normaliser).exp_()
        kept = probabilities.cumsum(-1) - probabilities < top_p
        if size == vocab_size or not bool(kept[:, -1].any()):
            break
    last = kept.sum(-1, keepdim=True).sub_(1).clamp_min_(0)
    return values.gather(1, last)
