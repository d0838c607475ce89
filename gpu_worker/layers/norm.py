"""Root mean square normalisation (Zhang and Sennrich, 2019), computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
        self.shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] float32 to the same shape in ``dtype``."""
        return F.rms_norm(x, self.shape, self.weight, self.eps).to(self.dtype)


class HeadNorm:
    """RMSNorm over each head of q and k (QK-norm), with one weight for q and one for k."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, kv_heads: int, eps: float) -> None:
        self.weight = torch.cat([q_weight.float().expand(heads, -1), k_weight.float().expand(kv_heads, -1)])
        self.eps = eps
        self.shape = tuple(q_weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + kv_heads, head_dim] float32 to the same."""
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.weight)
