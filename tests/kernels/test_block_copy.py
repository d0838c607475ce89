"""Copies of KV blocks."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.block_copy import block_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_blocks_are_copied_in_all_layers(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    cache = (torch.rand(3, 7, 2, 2, 16, head_dim, device=device) * 100).to(dtype)
    wanted = cache.clone()
    wanted[:, 4], wanted[:, 6], wanted[:, 5] = cache[:, 1], cache[:, 1], cache[:, 3]
    block_copy(cache, torch.tensor([[1, 4], [1, 6], [3, 5]], dtype=torch.int32, device=device))
    assert torch.equal(cache, wanted)


def test_no_pairs(device: torch.device) -> None:
    cache = torch.rand(1, 2, 2, 1, 16, 16, device=device)
    before = cache.clone()
    block_copy(cache, torch.empty((0, 2), dtype=torch.int32, device=device))
    assert torch.equal(cache, before)
