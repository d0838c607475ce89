"""Ids that no token of the tokenizer has are never sampled."""

from __future__ import annotations

import torch

from gpu_worker.sampling.base import SampleRows
from shared.messages import SlotInit


class PaddedVocabulary:
    """Models pad their logits to a round width; ids from ``num_tokens`` on stand for nothing."""

    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens

    def add(self, request: SlotInit) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        if self.num_tokens is not None and self.num_tokens < logits.shape[1]:
            logits[:, self.num_tokens :] = -torch.inf
