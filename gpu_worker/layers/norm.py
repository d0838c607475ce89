"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpu_worker import kernels

Normalise = Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], torch.Tensor]
AddNormalise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.dtype], torch.Tensor]


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Args:
        weight: [size]; kept in float32.
        dtype: of the result.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.float()
        self.eps = eps
        self.dtype = dtype
        self._normalise, self._add_normalise = _operations(weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] float32 to the same shape in ``dtype``."""
        return self._normalise(x, self.weight, self.eps, self.dtype)

    def add(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """``hidden += delta``, and the norm of the sum.

        Args:
            hidden: [rows, size] float32, updated in place.
            delta: [rows, size] of any float dtype, or None: nothing to add.

        Returns:
            [rows, size] in ``dtype``.
        """
        if delta is None:
            return self(hidden)
        return self._add_normalise(hidden, delta, self.weight, self.eps, self.dtype)


class HeadNorm:
    """RMSNorm over each head of q and k (QK-norm), with one weight for q and one for k.

    Attributes:
        weights: [2, head_dim] float32, of q and of k.
        weight: [heads + kv_heads, head_dim] float32, each head's.
    """

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, kv_heads: int, eps: float) -> None:
        self.weights = torch.stack([q_weight.float(), k_weight.float()])
        self.weight = torch.cat([self.weights[:1].expand(heads, -1), self.weights[1:].expand(kv_heads, -1)])
        self.eps = eps
        self.shape = tuple(q_weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + kv_heads, head_dim] float32 to the same."""
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.weight)


def _operations(device: torch.device) -> tuple[Normalise, AddNormalise]:
    if kernels.uses_kernels(device):
        from gpu_worker.kernels.norm import add_rms_norm, rms_norm

        return rms_norm, add_rms_norm
    return _rms_norm, _add_rms_norm


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps).to(dtype)


def _add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    hidden += delta
    return _rms_norm(hidden, weight, eps, dtype)
