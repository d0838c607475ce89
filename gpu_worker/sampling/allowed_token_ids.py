"""Allowed token ids: all others are masked (vLLM's ``SamplingParams.allowed_token_ids``)."""

from __future__ import annotations

import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.slot_ids import SlotIds
from shared.messages import SlotInit


class AllowedTokenIds:
    def __init__(self, device: torch.device) -> None:
        self.ids = SlotIds(device)

    def add(self, request: SlotInit) -> None:
        self.ids.put(request.slot, request.params.allowed_token_ids or [])

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        chosen = self.ids.rows_with_ids(rows)
        if not chosen:
            return
        row, ids = self.ids.of(rows, chosen)
        kept = logits[row, ids]
        logits.index_fill_(0, torch.tensor(chosen, device=logits.device), -torch.inf)
        logits[row, ids] = kept
