"""The gated feed-forward block of Llama and its kin."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpu_worker import kernels
from gpu_worker.layers.linear import LinearLayer

UNDIVIDED = 32768
"""Elements that torch computes in one piece on a CPU (its grain size). Beyond it threads share an operation at a border
that may lie inside a row, and the elements before a border are rounded by another exp."""


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up in one product.

    Args:
        device: of the layers.
        batch_invariant: a row's result is the same bits whatever other rows there are.
    """

    def __init__(
        self,
        gate_up: LinearLayer,
        down: LinearLayer,
        intermediate_size: int,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self._activate = _activation(device, max(1, UNDIVIDED // intermediate_size) if batch_invariant else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.gate_up(x)))


def _activation(device: torch.device, undivided_rows: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """``silu(gate) * up`` of [tokens, 2 * size], so many rows at a time where that matters."""
    if kernels.uses_kernels(device):
        from gpu_worker.kernels.activation import silu_mul

        return silu_mul
    if undivided_rows is None:
        return _silu_mul

    def in_pieces(gate_up: torch.Tensor) -> torch.Tensor:
        if len(gate_up) <= undivided_rows:
            return _silu_mul(gate_up)
        return torch.cat([_silu_mul(rows) for rows in torch.split(gate_up, undivided_rows)])

    return in_pieces


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
