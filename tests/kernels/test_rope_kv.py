"""QK-norm, rotary embedding and the write to the cache, against the CPU backend's own operations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu_worker.kernels.rope_kv import rotate_and_write
from gpu_worker.layers.norm import HeadNorm
from gpu_worker.layers.rotary import apply_rotary
from tests.kernels.rounding import relative_error

EPS = 1e-6
BLOCKS = 5
SENTINEL = 77.0


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    rotary_dim: int
    norm: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        norm = "-norm" if self.norm else ""
        dims = f"{self.head_dim}of{self.rotary_dim}"
        return f"{self.heads}x{self.kv_heads}x{dims}-{self.block_size}{norm}-{str(self.dtype).removeprefix('torch.')}"


SOME = [
    Case(4, 2, 64, 16, 64, True, torch.float32),
    Case(9, 3, 64, 32, 64, False, torch.bfloat16),
    Case(2, 2, 80, 16, 80, False, torch.float32),
    Case(2, 1, 80, 16, 32, True, torch.bfloat16),
    Case(8, 1, 96, 64, 96, True, torch.float32),
    Case(4, 4, 96, 16, 72, False, torch.float16),
    Case(16, 8, 128, 16, 128, True, torch.bfloat16),
    Case(16, 1, 128, 32, 64, True, torch.float32),
    Case(4, 1, 256, 64, 256, True, torch.float32),
    Case(8, 4, 256, 16, 64, False, torch.bfloat16),
    Case(4, 2, 16, 16, 16, True, torch.float32),
    Case(3, 3, 24, 8, 12, True, torch.float32),
]
ALL = [
    Case(ratio * 2, 2, head_dim, block_size, rotary_dim, norm, dtype)
    for head_dim in (64, 80, 96, 128, 256)
    for block_size in (16, 32, 64)
    for ratio in (1, 2, 3, 4, 7, 8, 16)
    for rotary_dim in (head_dim, head_dim // 2)
    for norm in (False, True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


def check(case: Case, device: torch.device, mapping_dtype: torch.dtype = torch.int32) -> None:
    torch.manual_seed(1)
    slots = [3 * case.block_size + 1, -1, case.block_size, 2 * case.block_size - 1, 5 * case.block_size - 1]
    mapping = torch.tensor(slots, dtype=mapping_dtype, device=device)
    tokens, rotated_heads = len(slots), case.heads + case.kv_heads
    width = (rotated_heads + case.kv_heads) * case.head_dim
    qkv = torch.randn(tokens, width, device=device).to(case.dtype)
    angles = torch.rand(tokens, 1, case.rotary_dim // 2, device=device) * 6
    table = torch.stack([angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], -1)], 1)
    cos, sin = table.unbind(1)
    q_weight, k_weight = torch.rand(2, case.head_dim, device=device) + 0.5
    head_norm = HeadNorm(q_weight, k_weight, case.heads, case.kv_heads, EPS) if case.norm else None
    shape = (BLOCKS, 2, case.kv_heads, case.block_size, case.head_dim)
    cache = torch.full(shape, SENTINEL, device=device).to(case.dtype)

    heads = qkv.view(tokens, -1, case.head_dim).float()
    exact, values = heads[:, :rotated_heads], heads[:, rotated_heads:]
    wanted = apply_rotary(head_norm(exact) if head_norm else exact, cos, sin)
    wanted_cache = cache.float()
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted_cache[slot // case.block_size, 0, :, slot % case.block_size] = wanted[token, case.heads :]
            wanted_cache[slot // case.block_size, 1, :, slot % case.block_size] = values[token]

    before = qkv.clone()
    query = rotate_and_write(qkv, head_norm.weights if head_norm else None, EPS, cos, sin, cache, mapping)
    assert query.shape == (tokens, case.heads, case.head_dim)
    assert query.dtype == case.dtype
    assert torch.equal(qkv, before)
    tolerance = relative_error(case.dtype)
    torch.testing.assert_close(query.float(), wanted[:, : case.heads], rtol=tolerance, atol=1e-5)
    torch.testing.assert_close(cache.float(), wanted_cache, rtol=tolerance, atol=1e-5)
    untouched = wanted_cache == SENTINEL
    assert torch.equal(cache.float()[untouched], wanted_cache[untouched])
    assert torch.equal(cache.float()[:, 1], wanted_cache[:, 1]), "values are copied bit for bit"


@pytest.mark.parametrize("case", SOME, ids=str)
def test_rotate_and_write(device: torch.device, case: Case) -> None:
    check(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_rotate_and_write_in_all_shapes(device: torch.device, case: Case) -> None:
    check(case, device)


def test_a_mapping_of_int64(device: torch.device) -> None:
    check(SOME[0], device, torch.int64)


def test_no_tokens(device: torch.device) -> None:
    empty = torch.empty(0, 128, device=device)
    cache = torch.zeros(2, 2, 1, 16, 32, device=device)
    cos = torch.empty(0, 1, 32, device=device)
    mapping = torch.empty(0, dtype=torch.int32, device=device)
    assert rotate_and_write(empty, None, EPS, cos, cos, cache, mapping).shape == (0, 2, 32)
