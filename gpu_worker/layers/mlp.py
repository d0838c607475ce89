"""The gated feed-forward block of Llama and its kin."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_worker.layers.linear import LinearLayer


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up in one product."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))
