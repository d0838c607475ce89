"""The gated feed-forward block of Llama and its kin."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_worker.layers.linear import LinearLayer

UNDIVIDED = 32768
"""Elements that torch computes in one piece on a CPU (its grain size). Beyond it threads share an operation at a border
that may lie inside a row, and the elements before a border are rounded by another exp."""


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up in one product.

    Args:
        batch_invariant: a row's result is the same bits whatever other rows there are.
    """

    def __init__(
        self, gate_up: LinearLayer, down: LinearLayer, intermediate_size: int, *, batch_invariant: bool = False
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self.undivided_rows = max(1, UNDIVIDED // intermediate_size) if batch_invariant else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        if self.undivided_rows is None or len(x) <= self.undivided_rows:
            return self.down(_activate(gate_up))
        return self.down(torch.cat([_activate(rows) for rows in torch.split(gate_up, self.undivided_rows)]))


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
