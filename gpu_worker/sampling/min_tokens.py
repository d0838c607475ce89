"""``min_tokens``: ``-inf`` for ids that would end the text, until that many tokens are generated.

Formula: ``transformers.MinNewTokensLengthLogitsProcessor``, over the end ids and the request's stop ids (vLLM's
``MinTokensLogitsProcessor``). Not where nothing else is left, as with allowed ids that all end the text.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.masking import mask_ids
from gpu_worker.sampling.slot_lists import RowIds, SlotLists, ids_or_none, stage_ids
from shared.messages import SlotInit


class MinTokens:
    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.min_tokens: Int64 = np.zeros(num_slots, np.int64)
        self.ends: SlotLists[Int64, RowIds] = SlotLists(stage_ids(device))
        """The ids that end a slot's text."""

    def add(self, request: SlotInit) -> None:
        params = request.params
        self.min_tokens[request.slot] = params.min_tokens
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))
        self.ends.put(request.slot, ids_or_none(sorted(ends)) if params.min_tokens else None)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        too_short = rows.num_outputs < self.min_tokens[rows.slots]
        staged = self.ends.of(rows.slots, too_short) if too_short.any() else None
        if staged is not None:
            mask_ids(logits, staged.row, staged.ids)
