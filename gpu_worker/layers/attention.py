"""The attention block: fused projection of q, k and v, optional QK-norm, rotary embedding, paged attention, output."""

from __future__ import annotations

import torch

from gpu_worker.attention.base import UNSCALED, KVScales, PagedAttention
from gpu_worker.forward_context import ForwardContext
from gpu_worker.layers.linear import LinearLayer
from gpu_worker.layers.norm import HeadNorm
from shared.model_config import ModelConfig


class Attention:
    """One layer's attention.

    Args:
        index: of the layer, which is its place in the KV cache.
        qkv: hidden to (num_heads + 2 * num_kv_heads) * head_dim.
        output: num_heads * head_dim to hidden.
        window: sliding window in tokens, or None.
        scales: of the layer's keys and values in the cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: PagedAttention,
        index: int,
        qkv: LinearLayer,
        output: LinearLayer,
        head_norm: HeadNorm | None = None,
        window: int | None = None,
        scales: KVScales = UNSCALED,
    ) -> None:
        self.backend, self.index, self.qkv, self.output = backend, index, qkv, output
        self.head_norm, self.window, self.scales = head_norm, window, scales
        self.scale = config.head_dim**-0.5

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens, hidden] to the same; writes the layer's keys and values into the cache."""
        backend, cache, metadata, scales = self.backend, context.kv_cache[self.index], context.attention, self.scales
        query = backend.rotate_and_write(self.qkv(x), self.head_norm, context.cos, context.sin, cache, metadata, scales)
        return self.output(backend.attend(query, cache, metadata, self.scale, self.window, scales))
