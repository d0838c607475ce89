"""QK-norm, rotary embedding and the write to the paged KV cache in one pass over the projection of q, k and v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.fp8 import to_dtype
from gpu_worker.kernels.programmatic_launch import let_next_start, pdl_options, wait_for_previous

TILE = 1024
"""Elements of a program: 64 threads with 16 of them each."""


def rotate_and_write(
    qkv: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Normalise and rotate q and k, write k and v to the cache, return q. Computed in float32, rounded once.

    With x1 and x2 the first and the second half of the first ``rotary_dim`` elements of a head, x1 becomes
    ``x1 * cos - x2 * sin`` and x2 ``x2 * cos + x1 * sin``; the other elements stay (Su et al., 2021, in the order of
    transformers' ``rotate_half``).

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: all heads of q, then of k, then of v.
        norm_weight: [2, head_dim] float32, the weight of the RMSNorm over each head of q and of k; None: no norm.
        eps: of that norm.
        cos: [tokens, rotary_dim] or [tokens, 1, rotary_dim] float32; a token's row is contiguous.
        sin: like ``cos``, with the sign of ``rotate_half``: negative in the first half.
        cache: [blocks, 2, num_kv_heads, block_size, head_dim], contiguous: keys, then values; of qkv's dtype or
            float8_e4m3fn.
        slot_mapping: [tokens] int32 or int64, ``block * block_size + offset``; nothing is written for a negative one.
        k_scale: what the cache's keys are to be multiplied by when they are read: they are written divided by it.
        v_scale: the same of the values.

    Returns:
        [tokens, num_heads, head_dim], of qkv's dtype.
    """
    tokens, width = qkv.shape
    _, _, kv_heads, block_size, head_dim = cache.shape
    heads = width // head_dim - 2 * kv_heads
    half, rest = cos.shape[-1] // 2, head_dim - cos.shape[-1]
    assert qkv.is_contiguous()
    assert cache.is_contiguous()
    assert cos.shape == sin.shape
    assert cos.stride() == sin.stride()
    query = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return query
    half_tile = triton.next_power_of_2(half)
    tile_heads = max(1, TILE // (2 * half_tile))
    _rotate_and_write_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, tile_heads))](
        qkv, cos if norm_weight is None else norm_weight, cos, sin, cache, slot_mapping, query,
        eps, 1.0 / k_scale, 1.0 / v_scale, cos.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=half,
        HALF_TILE=half_tile,
        REST=rest,
        REST_TILE=triton.next_power_of_2(rest) if rest else 0,
        TILE_HEADS=tile_heads,
        HAS_NORM=norm_weight is not None,
        num_warps=2,
        **pdl_options(qkv.device),
    )  # fmt: skip
    return query


@triton.jit
def _store(value, cache_factor, query_ptrs, cache_ptrs, to_query, to_cache):
    tl.store(query_ptrs, value.to(query_ptrs.dtype.element_ty), to_query)
    tl.store(cache_ptrs, to_dtype(value * cache_factor, cache_ptrs.dtype.element_ty), to_cache)


@triton.jit
def _rotate_and_write_kernel(
    qkv_ptr, norm_weight_ptr, cos_ptr, sin_ptr, cache_ptr, slot_mapping_ptr, query_ptr,
    eps, k_factor, v_factor, cos_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr,
    HALF_TILE: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, TILE_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    exists = head < HEADS + 2 * KV_HEADS
    is_query = head < HEADS
    is_rotated = head < HEADS + KV_HEADS
    column = tl.arange(0, HALF_TILE)[None, :]
    in_half = column < HALF
    if REST > 0:
        rest_column = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        in_rest = rest_column < HEAD_DIM
    if HAS_NORM:
        weight_ptrs = norm_weight_ptr + tl.where(is_query, 0, HEAD_DIM)
        w1 = tl.load(weight_ptrs + column, is_rotated & in_half, other=1.0)
        w2 = tl.load(weight_ptrs + HALF + column, is_rotated & in_half, other=1.0)
        if REST > 0:
            w3 = tl.load(weight_ptrs + rest_column, is_rotated & in_rest, other=1.0)
    wait_for_previous(PDL)

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    # Heads of k and v lie in the cache as they do in qkv: the keys' [kv_heads, block_size, head_dim], then the values'.
    cache_row = (slot // BLOCK_SIZE * (2 * KV_HEADS) + head - HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    from_ptrs = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    query_ptrs = query_ptr + (token * HEADS + head) * HEAD_DIM
    cache_ptrs = cache_ptr + cache_row * HEAD_DIM
    to_cache = exists & (head >= HEADS) & (slot >= 0)
    factor = tl.where(is_rotated, k_factor, v_factor)

    x1 = tl.load(from_ptrs + column, exists & in_half, other=0.0).to(tl.float32)
    x2 = tl.load(from_ptrs + HALF + column, exists & in_half, other=0.0).to(tl.float32)
    if REST > 0:
        x3 = tl.load(from_ptrs + rest_column, exists & in_rest, other=0.0).to(tl.float32)

    if HAS_NORM:
        squares = tl.sum(x1 * x1, 1, keep_dims=True) + tl.sum(x2 * x2, 1, keep_dims=True)
        if REST > 0:
            squares += tl.sum(x3 * x3, 1, keep_dims=True)
        scale = tl.where(is_rotated, tl.rsqrt(squares / HEAD_DIM + eps), 1.0)
        x1 = x1 * scale * w1
        x2 = x2 * scale * w2
        if REST > 0:
            x3 = x3 * scale * w3

    cos = tl.load(cos_ptr + token * cos_stride + column, in_half, other=1.0)
    minus_sin = tl.load(sin_ptr + token * cos_stride + column, in_half, other=0.0)
    y1 = tl.where(is_rotated, x1 * cos + x2 * minus_sin, x1)
    y2 = tl.where(is_rotated, x2 * cos - x1 * minus_sin, x2)
    _store(y1, factor, query_ptrs + column, cache_ptrs + column, is_query & in_half, to_cache & in_half)
    _store(y2, factor, query_ptrs + HALF + column, cache_ptrs + HALF + column, is_query & in_half, to_cache & in_half)
    if REST > 0:
        _store(x3, factor, query_ptrs + rest_column, cache_ptrs + rest_column, is_query & in_rest, to_cache & in_rest)
