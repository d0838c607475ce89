"""The attention block: fused projection of q, k and v, optional QK-norm, rotary embedding, paged attention, output."""

from __future__ import annotations

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_context import ForwardContext
from gpu_worker.layers.linear import LinearLayer
from gpu_worker.layers.norm import HeadNorm
from gpu_worker.layers.rotary import apply_rotary
from shared.model_config import ModelConfig


class Attention:
    """One layer's attention.

    Args:
        index: of the layer, which is its place in the KV cache.
        qkv: hidden to (num_heads + 2 * num_kv_heads) * head_dim.
        output: num_heads * head_dim to hidden.
        window: sliding window in tokens, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        index: int,
        qkv: LinearLayer,
        output: LinearLayer,
        head_norm: HeadNorm | None = None,
        window: int | None = None,
    ) -> None:
        self.backend, self.index, self.qkv, self.output = backend, index, qkv, output
        self.head_norm, self.window = head_norm, window
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rotated_heads = config.num_heads + config.num_kv_heads
        self.query_size = config.num_heads * config.head_dim
        self.rotated_size = self.rotated_heads * config.head_dim
        self.scale = config.head_dim**-0.5

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens, hidden] to the same; writes the layer's keys and values into the cache."""
        qkv = self.qkv(x)
        heads = qkv[:, : self.rotated_size].view(-1, self.rotated_heads, self.head_dim)
        exact = heads.float()
        if self.head_norm is not None:
            exact = self.head_norm(exact)
        rotated = apply_rotary(exact, context.cos, context.sin)
        query, keys = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        heads[:, self.num_heads :].copy_(keys)
        cache = context.kv_cache[self.index]
        self.backend.write(cache, qkv[:, self.query_size :], context.attention)
        return self.output(self.backend.attend(query, cache, context.attention, self.scale, self.window))
