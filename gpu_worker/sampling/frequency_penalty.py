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
        # Counts are whole numbers, exact in any order of the additions; penalties added one by one would round.
        counts = logits.new_zeros(len(chosen), logits.shape[1])
        counts.index_put_((row, ids), logits.new_ones(()), accumulate=True)
        places = torch.from_numpy(chosen).to(logits.device)[row], ids
        logits[places] = logits[places] - penalty * counts[row, ids]
