"""``min_tokens``: ids that would end the text are masked until that many tokens are generated.

Not where ``allowed_token_ids`` allows nothing but such ids: a row keeps at least one token.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from shared.messages import SlotInit


class MinTokens:
    def __init__(self, num_slots: int) -> None:
        self.min_tokens: Int64 = np.zeros(num_slots, np.int64)
        self.ends: dict[int, torch.Tensor] = {}
        """The ids that end a slot's text."""

    def add(self, request: SlotInit) -> None:
        params = request.params
        self.min_tokens[request.slot] = params.min_tokens
        self.ends.pop(request.slot, None)
        if params.min_tokens:
            ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))
            allowed = params.allowed_token_ids
            if allowed is not None and ids.issuperset(allowed):
                self.min_tokens[request.slot] = 0
            self.ends[request.slot] = torch.tensor(sorted(ids), dtype=torch.int64)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        for row in np.flatnonzero(rows.num_outputs < self.min_tokens[rows.slots]):
            logits[int(row), self.ends[int(rows.slots[row])].to(logits.device)] = -torch.inf
