"""The paged KV cache: one pool of blocks for each layer, all layers in one tensor."""

from __future__ import annotations

import math

import numpy as np
import torch

from gpu_worker.attention.base import PagedAttention
from shared.errors import StartupError

DEFAULT_CPU_BYTES = 2**30


class KVCache:
    """The pool. Block 0 is the null block, which takes what belongs to nobody.

    Attributes:
        tensor: [layers, num_blocks, ...] in the backend's layout. Memory that was never written reads as zeros, so that
            masked positions of a fresh block add zeros and not whatever was there.
        block_bytes: of one block in all layers.
    """

    def __init__(
        self,
        num_layers: int,
        backend: PagedAttention,
        dtype: torch.dtype,
        device: torch.device,
        total_bytes: int,
        num_blocks: int | None = None,
    ) -> None:
        """
        Args:
            total_bytes: size of the pool at most.
            num_blocks: that many blocks instead.

        Raises:
            StartupError: not even one block beside the null block fits.
        """
        self.block_bytes = num_layers * math.prod(backend.cache_shape(1)) * dtype.itemsize
        self.num_blocks = num_blocks if num_blocks is not None else total_bytes // self.block_bytes
        if self.num_blocks < 2:
            raise StartupError(
                f"the KV cache has room for {self.num_blocks} blocks of {self.block_bytes} bytes, and one of them is "
                "the null block; raise --kv-cache-bytes or --num-gpu-blocks-override"
            )
        self.tensor = _zeros((num_layers, *backend.cache_shape(self.num_blocks)), dtype, device)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks, in all layers; ``pairs`` [c, 2] int64: source, destination."""
        self.tensor[:, pairs[:, 1]] = self.tensor[:, pairs[:, 0]]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU as untouched pages, which cost neither time nor memory until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
