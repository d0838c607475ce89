"""The gated feed-forward block of Llama and its kin."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpu_worker import kernels
from gpu_worker.layers.linear import LinearLayer, make_linear

UNDIVIDED = 32768
"""Elements that torch computes in one piece on a CPU (its grain size). Beyond it threads share an operation at a border
that may lie inside a row, and the elements before a border are rounded by another exp."""


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``.

    Args:
        gated: of :func:`make_gated_linear`.
    """

    def __init__(self, gated: LinearLayer, down: LinearLayer) -> None:
        self.gated, self.down = gated, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(x))


def make_gated_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> LinearLayer:
    """``silu(gate(x)) * up(x)``, [tokens, in] to [tokens, size], with gate and up in one product.

    Args:
        weight: [2 * size, in], the gate first; it is taken over (it may be repacked).
        bias: [2 * size].
        batch_invariant: a row's result is the same bits whatever other rows there are.
    """
    if weight.is_cuda:
        from gpu_worker.layers.cuda_linear import CudaGatedLinear

        return CudaGatedLinear(weight, bias, batch_invariant=batch_invariant)
    product = make_linear(weight, bias, batch_invariant=batch_invariant)
    rows = max(1, 2 * UNDIVIDED // len(weight)) if batch_invariant else None
    return GatedLinear(product, _activation(weight.device, rows))


class GatedLinear:
    """A product of gate and up, then the activation."""

    def __init__(self, gate_up: LinearLayer, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.gate_up, self._activate = gate_up, activate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(self.gate_up(x))


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
