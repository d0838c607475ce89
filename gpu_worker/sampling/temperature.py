"""Temperature (Ackley et al., 1985): ``logit / temperature`` (``transformers.TemperatureLogitsWarper``)."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from shared.messages import SlotInit


class Temperature:
    def __init__(self, num_slots: int) -> None:
        self.temperature = np.ones(num_slots, np.float32)

    def add(self, request: SlotInit) -> None:
        self.temperature[request.slot] = request.params.temperature

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        temperature = self.temperature[rows.slots]
        if (temperature != 1.0).any():
            logits /= torch.from_numpy(temperature).to(logits.device)[:, None]
