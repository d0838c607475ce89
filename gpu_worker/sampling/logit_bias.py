"""Logit bias (OpenAI's API reference): ``logit + bias`` for the tokens that a request names."""

from __future__ import annotations

import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.slot_ids import SlotIds
from shared.messages import SlotInit


class LogitBias:
    def __init__(self, device: torch.device) -> None:
        self.ids = SlotIds(device)
        self.biases: dict[int, torch.Tensor] = {}

    def add(self, request: SlotInit) -> None:
        slot, pairs = request.slot, request.params.logit_bias
        self.ids.put(slot, [token for token, _ in pairs])
        self.biases.pop(slot, None)
        if pairs:
            self.biases[slot] = torch.tensor([bias for _, bias in pairs], device=self.ids.device)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        chosen = self.ids.rows_with_ids(rows)
        if not chosen:
            return
        row, ids = self.ids.of(rows, chosen)
        biases = torch.cat([self.biases[int(rows.slots[index])] for index in chosen])
        logits[row, ids] = logits[row, ids] + biases
