"""Frequency penalty (OpenAI's API reference): ``logit - penalty * count`` for each token of the output."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.past_tokens import penalised_output
from shared.messages import SlotInit


class FrequencyPenalty:
    def __init__(self, num_slots: int) -> None:
        self.penalty = np.zeros(num_slots, np.float32)

    def add(self, request: SlotInit) -> None:
        self.penalty[request.slot] = request.params.frequency_penalty

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        found = penalised_output(logits, rows, self.penalty)
        if found is None:
            return
        chosen, row, ids, penalty = found
        places = torch.from_numpy(chosen).to(logits.device)[row], ids
        before = logits[places]
        # Counted in the logits' own places, as whole numbers, which are exact in any order of the additions.
        logits[places] = 0.0
        logits.index_put_(places, logits.new_ones(()), accumulate=True)
        logits[places] = before - penalty * logits[places]
