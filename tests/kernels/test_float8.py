"""A float8 cache in the kernels: every number is rounded as torch does, and read as what was stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpu_worker.attention.base import AttentionShape, KVScales
from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.kernels.fp8 import to_dtype, unpack
from gpu_worker.kernels.rope_kv import rotate_and_write
from tests.kernels.attention_reference import HALF, Paged, attend, make_paged, tolerance

FLOAT8 = torch.float8_e4m3fn
KV_HEADS, GROUP = 2, 3
SCALES = KVScales(0.5, 0.25)


@triton.jit
def _round_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, to_dtype(tl.load(x_ptr + place), y_ptr.dtype.element_ty))


@triton.jit
def _unpack_kernel(pair_ptr, low_ptr, high_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    low, high = unpack(tl.load(pair_ptr + place))
    tl.store(low_ptr + place, low)
    tl.store(high_ptr + place, high)


def test_rounding(device: torch.device) -> None:
    """To the nearest, ties to even; below the smallest normal number, too; and at most 448."""
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    every = every[every.isfinite()].sort().values
    middles = (every[1:] + every[:-1]) / 2
    random = torch.randn(768, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(-4, 3, (768,))
    large = torch.tensor([449.0, 464.0, 470.0, 512.0, 1e6, -449.0, -1e30])
    x = torch.cat([every, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), random, large])
    x = torch.nn.functional.pad(x, (0, -len(x) % 256)).to(device)
    y = torch.empty(len(x), dtype=FLOAT8, device=device)
    _round_kernel[(len(x) // 256,)](x, y, BLOCK=256)
    assert torch.equal(y.float(), x.clamp(-448, 448).to(FLOAT8).float())


def test_unpacking(device: torch.device) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[numbers.view(FLOAT8).float().isfinite()]
    first, second = numbers.repeat(2)[:256], numbers.flip(0).repeat(2)[:256]
    pairs = torch.stack([first, second], 1).view(torch.int16).view(-1).to(device)
    low, high = (torch.empty(256, dtype=torch.float16, device=device) for _ in range(2))
    _unpack_kernel[(1,)](pairs, low, high, BLOCK=256)
    assert torch.equal(low.cpu(), first.view(FLOAT8).half())
    assert torch.equal(high.cpu(), second.view(FLOAT8).half())


def test_writing_with_scales(device: torch.device) -> None:
    """As a float32 cache divided by the scales and rounded once."""
    torch.manual_seed(2)
    qkv = torch.randn(3, 6 * 64, device=device).to(torch.bfloat16) * 3
    angles = torch.rand(3, 1, 32, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    sin[..., :32] *= -1
    exact = torch.zeros(2, 2, 2, 16, 64, device=device)
    cache = exact.to(FLOAT8)
    mapping = torch.tensor([17, -1, 30], dtype=torch.int32, device=device)
    query = rotate_and_write(qkv, None, 1e-6, cos, sin, exact, mapping)
    assert torch.equal(rotate_and_write(qkv, None, 1e-6, cos, sin, cache, mapping, 0.25, 0.5), query)
    scales = torch.tensor([0.25, 0.5], device=device).view(2, 1, 1, 1)
    assert torch.equal(cache.float(), (exact / scales).to(FLOAT8).float())
    assert exact[1, :, :, 1].any()


def as_float8(paged: Paged) -> torch.Tensor:
    """The cache as float8 with ``SCALES``; ``paged`` becomes what is read from it, in float32."""
    scales = torch.tensor(SCALES, device=paged.cache.device).view(2, 1, 1, 1)
    stored = (paged.cache / scales).to(FLOAT8)
    paged.cache = stored.float() * scales
    return stored


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("head_dim", "batch_invariant"), [(64, False), (80, False), (128, False), (64, True)])
def test_reading_with_scales(head_dim: int, batch_invariant: bool, window: int | None, device: torch.device) -> None:
    """Prefill spans and decode rows; the lengths end before, at and behind a tile."""
    spans, decodes = [(0, 20, 50), (1, 7, 7)], [(2, 128), (3, 129), (4, 1), (5, 33)]
    paged = make_paged([50, 7, 128, 129, 1, 33], KV_HEADS, head_dim, 16, torch.float32, device)
    cache, scale = as_float8(paged), head_dim**-0.5
    shape = AttentionShape(KV_HEADS * GROUP, KV_HEADS, head_dim, 16, batch_invariant)
    backend = TritonPagedAttention(shape, device, cache_dtype=FLOAT8, dtype=HALF, max_rows=32, max_context=2048)
    cut = backend.cut_prefill(np.array([(0, 0, 20, 50), (1, 20, 7, 7)], np.int32))
    slots, contexts = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*decodes, strict=True))
    items = torch.from_numpy(cut.table).to(device)
    metadata = backend.prepare_mixed(cut, items, 27, slots, contexts, paged.block_tables)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(31, KV_HEADS * GROUP, head_dim, generator=generator).to(HALF).to(device)
    result = backend.attend(query, cache, metadata, scale, window, SCALES).float()
    start = 0
    for slot, count, context in [*spans, *((slot, 1, context) for slot, context in decodes)]:
        expected = attend(query[start : start + count], *paged.context(slot, context), scale, window)
        found = result[start : start + count].view_as(expected)
        torch.testing.assert_close(found, expected, **tolerance(HALF))
        start += count


def test_a_large_query_stays_finite(device: torch.device) -> None:
    paged = make_paged([40], KV_HEADS, 64, 16, torch.float32, device)
    shape = AttentionShape(KV_HEADS * GROUP, KV_HEADS, 64, 16)
    backend = TritonPagedAttention(shape, device, cache_dtype=FLOAT8, dtype=torch.float32, max_rows=4, max_context=64)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    metadata = backend.prepare_decode(one, one + 40, paged.block_tables)
    query = torch.full((1, KV_HEADS * GROUP, 64), 1e6, device=device)
    assert backend.attend(query, as_float8(paged), metadata, 0.125, None, SCALES).isfinite().all()
