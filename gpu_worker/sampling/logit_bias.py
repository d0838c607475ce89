"""Logit bias (OpenAI's API reference): ``logit + bias`` for the tokens that a request names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.slot_lists import SlotLists, stage_ids
from shared.messages import SlotInit

Pairs = tuple[Int64, npt.NDArray[np.float32]]


class LogitBias:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: SlotLists[Pairs, tuple[torch.Tensor, ...]] = SlotLists(self._stage)

    def add(self, request: SlotInit) -> None:
        pairs = request.params.logit_bias
        ids = np.array([token for token, _ in pairs], np.int64)
        self.pairs.put(request.slot, (ids, np.array([bias for _, bias in pairs], np.float32)) if pairs else None)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        staged = self.pairs.of(rows.slots)
        if staged is None:
            return
        row, ids, biases = staged
        logits[row, ids] = logits[row, ids] + biases

    def _stage(self, rows: Int64, slots: Int64, parts: list[Pairs]) -> tuple[torch.Tensor, ...]:
        """[entries] rows, token ids and biases."""
        _, row, ids = stage_ids(self.device)(rows, slots, [ids for ids, _ in parts])
        return row, ids, torch.from_numpy(np.concatenate([biases for _, biases in parts])).to(self.device)
