"""Prefill attention over the paged KV cache: ragged spans of query tokens, each causal at the end of its context.

FlashAttention-2 (Dao, 2023) with the heads that share a KV head packed beside the query tokens in the rows of a tile:
row r is token ``r // group`` and head ``r % group``. Keys and values, those of the span itself too, are read through
the block table.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.fp8 import query_operand

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is compiled and launched."""

    rows: int
    """Of a tile: query tokens * heads of a group."""
    keys: int
    """Tokens of the context in one iteration."""
    num_warps: int
    num_stages: int


def prefill_config(
    head_dim: int, dtype: torch.dtype, longest: int, total: int, kv_heads: int, num_sms: int
) -> PrefillConfig:
    """The configuration for a shape.

    Args:
        dtype: of the products.
        longest: query tokens * heads of a group in the longest span.
        total: the same of all spans.
    """
    is_wide = triton.next_power_of_2(head_dim) > 128
    if dtype.itemsize > 2:
        return PrefillConfig(rows=32, keys=16 if is_wide else 32, num_warps=8, num_stages=2)
    if longest <= 16:
        return PrefillConfig(rows=16, keys=32 if is_wide else 64, num_warps=4, num_stages=3)
    if is_wide or total * kv_heads < 128 * num_sms or longest <= 64:
        return PrefillConfig(rows=64, keys=32 if is_wide else 64, num_warps=4, num_stages=2 if is_wide else 3)
    return PrefillConfig(rows=128, keys=64, num_warps=8, num_stages=3)


def prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    tiles: torch.Tensor,
    block_tables: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    config: PrefillConfig,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """``softmax(q @ k.T * scale + mask) @ v`` for each query token over its context; scores and sums in float32.

    Only the tokens of ``tiles`` are written.

    Args:
        query: [tokens, heads, head_dim] of the model's dtype; a token's heads are contiguous.
        cache: [blocks, 2, kv_heads, block_size, head_dim], keys first, contiguous; of query's dtype or float8_e4m3fn.
        tiles: [tiles, 4] int32 on the device, of ``attention_plan.prefill_tiles(spans, config.rows // group)``.
        block_tables: [slots, max_blocks] int32, rows contiguous.
        output: [tokens, heads, head_dim] of query's dtype, or flat heads; a token is contiguous.
        window: positions that a token sees, itself included; None: all before it.
        k_scale: what the cache's keys must be multiplied by.
        v_scale: the same of the values.
    """
    _, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = cache.shape
    assert cache.is_contiguous()
    assert query.stride()[1:] == (head_dim, 1)
    assert heads // kv_heads <= config.rows
    if not len(tiles):
        return
    _prefill_kernel[(len(tiles), kv_heads)](
        query,
        cache,
        output,
        tiles,
        block_tables,
        scale * k_scale * LOG2_E,
        v_scale,
        window or 0,
        query.stride(0),
        output.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=config.rows,
        KEYS=config.keys,
        HAS_WINDOW=window is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def _load_block(table_ptr, start, context, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The block of each key from ``start`` on; one for all of them, if a block holds whole tiles."""
    token = start if BLOCK_SIZE % KEYS == 0 else start + tl.arange(0, KEYS)
    return tl.load(table_ptr + token // BLOCK_SIZE, token < context, other=0)


@triton.jit
def attend_keys(
    maximum,
    total,
    values,
    query,
    cache_ptr,
    table_ptr,
    begin,
    end,
    position,
    context,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Online softmax over the keys from ``begin`` to ``end``, a multiple of KEYS from each other.

    Without IS_MASKED all of them exist and are visible to all rows.
    """
    dim = tl.arange(0, DIM_TILE)
    query = query_operand(query, cache_ptr.dtype.element_ty)
    # Block indices are read an iteration ahead, as in ``paged_decode``.
    block = _load_block(table_ptr, begin, context, BLOCK_SIZE, KEYS)
    for start in tl.range(begin, end, KEYS):
        next_block = _load_block(table_ptr, start + KEYS, context, BLOCK_SIZE, KEYS)
        token = start + tl.arange(0, KEYS)
        place = block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + token % BLOCK_SIZE * HEAD_DIM
        pointers = cache_ptr + place[:, None] + dim[None, :]
        if IS_MASKED:
            mask = (token < context)[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(pointers, mask, other=0.0)
            value = tl.load(pointers + KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask, other=0.0)
        elif HEAD_DIM != DIM_TILE:
            key = tl.load(pointers, (dim < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(pointers + KV_HEADS * BLOCK_SIZE * HEAD_DIM, (dim < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(pointers)
            value = tl.load(pointers + KV_HEADS * BLOCK_SIZE * HEAD_DIM)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if IS_MASKED:
            is_visible = token[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_visible &= token[None, :] > position[:, None] - window
            scores = tl.where(is_visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        # A row that has seen no key yet has a maximum of minus infinity, which must not be subtracted from itself.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if IS_MASKED else new_maximum
        probabilities = tl.exp2(scores * scale - reference[:, None])
        decay = tl.exp2(maximum - reference)
        total = total * decay + tl.sum(probabilities, 1)
        values = values * decay[:, None]
        values = tl.dot(probabilities.to(query.dtype), value.to(query.dtype), values, input_precision="ieee")
        maximum, block = new_maximum, next_block
    return maximum, total, values


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["table_stride"])
def _prefill_kernel(
    query_ptr,
    cache_ptr,
    output_ptr,
    tiles_ptr,
    block_tables_ptr,
    scale,
    v_scale,
    window,
    query_stride,
    output_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + 4 * tile)
    first_token = tl.load(tiles_ptr + 4 * tile + 1)
    tokens = tl.load(tiles_ptr + 4 * tile + 2)
    first_position = tl.load(tiles_ptr + 4 * tile + 3)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_TILE)
    token = row // GROUP
    place = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    global_token = (first_token + token).to(tl.int64)[:, None]
    is_element = (token < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + global_token * query_stride + place, is_element, other=0.0)

    position = first_position + token
    context = first_position + tokens
    table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
    head_ptr = cache_ptr + head * (BLOCK_SIZE * HEAD_DIM)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, DIM_TILE), tl.float32)
    if HAS_WINDOW:
        masked_from = tl.maximum(first_position + 1 - window, 0) // KEYS * KEYS
    else:
        masked_from = (first_position + 1) // KEYS * KEYS
        maximum, total, values = attend_keys(
            maximum, total, values, query, head_ptr, table_ptr, 0, masked_from, position, context, window, scale,
            KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, KEYS, False, False,
        )  # fmt: skip
    maximum, total, values = attend_keys(
        maximum, total, values, query, head_ptr, table_ptr, masked_from, context, position, context, window, scale,
        KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, KEYS, HAS_WINDOW, True,
    )  # fmt: skip
    # Rows beyond the last token may have seen nothing in their window.
    result = values * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(output_ptr + global_token * output_stride + place, result.to(output_ptr.dtype.element_ty), is_element)
