"""Repetition penalty (Keskar et al., 2019, section 4.1; the signs are transformers').

For each distinct token of the prompt and the output: ``logit / penalty`` if the logit is positive, else
``logit * penalty`` (``transformers.RepetitionPenaltyLogitsProcessor``).
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.past_tokens import prompt_and_output
from shared.messages import SlotInit

SMALLEST = 1e-6
"""A smaller penalty acts as this one, which puts seen tokens a million times above the others: the division would
overflow."""


class RepetitionPenalty:
    def __init__(self, num_slots: int) -> None:
        self.penalty = np.ones(num_slots, np.float32)

    def add(self, request: SlotInit) -> None:
        self.penalty[request.slot] = max(request.params.repetition_penalty, SMALLEST)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        penalties = self.penalty[rows.slots]
        chosen = np.flatnonzero(penalties != 1.0)
        if not len(chosen):
            return
        row, ids = prompt_and_output(rows, chosen)
        penalty = torch.from_numpy(penalties[chosen]).to(logits.device)[row]
        places = torch.from_numpy(chosen).to(logits.device)[row], ids
        # All values are read before one is written, so that a token that occurs twice is penalised once.
        seen = logits[places]
        logits[places] = torch.where(seen > 0, seen / penalty, seen * penalty)
