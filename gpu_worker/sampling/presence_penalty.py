"""Presence penalty (OpenAI's API reference): ``logit - penalty`` for each distinct token of the output."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.past_tokens import penalised_output
from shared.messages import SlotInit


class PresencePenalty:
    def __init__(self, num_slots: int) -> None:
        self.penalty = np.zeros(num_slots, np.float32)

    def add(self, request: SlotInit) -> None:
        self.penalty[request.slot] = request.params.presence_penalty

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        found = penalised_output(logits, rows, self.penalty)
        if found is None:
            return
        chosen, row, ids, penalty = found
        places = torch.from_numpy(chosen).to(logits.device)[row], ids
        # All values are read before one is written, so that a token that occurs twice is penalised once.
        logits[places] = logits[places] - penalty
