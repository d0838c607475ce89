"""Allowed token ids: ``-inf`` for all others (vLLM's ``SamplingParams.allowed_token_ids``)."""

from __future__ import annotations

import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.slot_lists import RowIds, SlotLists, ids_or_none, stage_ids
from shared.messages import SlotInit


class AllowedTokenIds:
    def __init__(self, device: torch.device) -> None:
        self.ids: SlotLists[Int64, RowIds] = SlotLists(stage_ids(device))

    def add(self, request: SlotInit) -> None:
        self.ids.put(request.slot, ids_or_none(request.params.allowed_token_ids))

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        staged = self.ids.of(rows.slots)
        if staged is None:
            return
        chosen, row, ids = staged
        kept = logits[row, ids]
        logits.index_fill_(0, chosen, -torch.inf)
        logits[row, ids] = kept
