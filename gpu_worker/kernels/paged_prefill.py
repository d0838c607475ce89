"""Prefill attention over the paged KV cache: ragged spans of query tokens, each causal at the end of its context.

FlashAttention-2 (Dao, 2023) with the heads that share a KV head packed beside the query tokens in the rows of a tile:
row r is token ``r // group`` and head ``r % group``. Keys and values, those of the span itself too, are read through
the block table.

Whole tiles have a program each. With contexts in pieces the programs take the items of ``prefill_plan`` in turns; each
piece leaves a partial result, and the last program that arrives joins them, in their order.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from gpu_worker.kernels import prefill_plan
from gpu_worker.kernels.fp8 import query_operand

LOG2_E = math.log2(math.e)
COLUMNS = tl.constexpr(prefill_plan.COLUMNS)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is compiled and launched."""

    rows: int
    """Of a tile: query tokens * heads of a group."""
    keys: int
    """Tokens of the context in one iteration."""
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    is_hopper: bool = False
    """``hopper_prefill`` computes it, but for windows."""

    @property
    def piece_keys(self) -> int:
        """The length of a piece is a multiple of this."""
        return HOPPER_KEYS if self.is_hopper else self.keys


HOPPER_ROWS, HOPPER_KEYS = 128, 128
"""Of a tile, and of an iteration, in ``hopper_prefill``."""
MAX_ROWS, MAX_CELLS = 128, 128 * 128
"""Rows, and rows * dimensions, of a tile at most."""
PIECES = 2
"""That there is room for, for each multiprocessor, those of all KV heads together."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """What pieces leave; for one stream."""

    values: torch.Tensor
    """float32 [pieces * kv_heads * MAX_CELLS]."""
    statistics: torch.Tensor
    """float32 [pieces * kv_heads * 2 * MAX_ROWS]: maximum and total of each row."""
    arrivals: torch.Tensor
    """int32 [pieces * kv_heads], zeros between launches."""
    max_pieces: int


def make_prefill_workspace(kv_heads: int, num_sms: int, device: torch.device) -> PrefillWorkspace:
    """For ``prefill`` of any configuration."""
    pieces = PIECES * num_sms // kv_heads
    return PrefillWorkspace(
        torch.empty(pieces * kv_heads * MAX_CELLS, dtype=torch.float32, device=device),
        torch.empty(pieces * kv_heads * 2 * MAX_ROWS, dtype=torch.float32, device=device),
        torch.zeros(pieces * kv_heads, dtype=torch.int32, device=device),
        pieces,
    )


def prefill_config(
    head_dim: int,
    dtype: torch.dtype,
    longest: int,
    total: int,
    kv_heads: int,
    num_sms: int,
    has_hopper: bool = False,
) -> PrefillConfig:
    """The configuration for a shape.

    Args:
        dtype: of the products.
        longest: query tokens * heads of a group in the longest span.
        total: the same of all spans.
        has_hopper: ``hopper_prefill`` can compute it.
    """
    is_wide = triton.next_power_of_2(head_dim) > 128
    if dtype.itemsize > 2:
        return PrefillConfig(rows=32, keys=16 if is_wide else 32, num_warps=8, num_stages=2)
    if longest <= 16:
        return PrefillConfig(rows=16, keys=32 if is_wide else 64, num_warps=4, num_stages=3)
    if has_hopper and longest > 64:
        return PrefillConfig(HOPPER_ROWS, keys=64, num_warps=8, num_stages=3, programs_per_sm=1, is_hopper=True)
    if is_wide or total * kv_heads < 128 * num_sms or longest <= 64:
        return PrefillConfig(rows=64, keys=32 if is_wide else 64, num_warps=4, num_stages=2 if is_wide else 3)
    return PrefillConfig(rows=128, keys=64, num_warps=8, num_stages=3, programs_per_sm=1)


def prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    items: torch.Tensor,
    block_tables: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    config: PrefillConfig,
    programs: int | None,
    workspace: PrefillWorkspace,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """``softmax(q @ k.T * scale + mask) @ v`` for each query token over its context; scores and sums in float32.

    Only the tokens of ``items`` are written.

    Args:
        query: [tokens, heads, head_dim] of the model's dtype; a token's heads are contiguous.
        cache: [blocks, 2, kv_heads, block_size, head_dim], keys first, contiguous; of query's dtype or float8_e4m3fn.
        items: [1 + items or more, COLUMNS] int32 on the device, of ``prefill_plan.prefill_items`` for this ``config``,
            with no more pieces than ``workspace`` has room for.
        block_tables: [slots, max_blocks] int32, rows contiguous.
        output: [tokens, heads, head_dim] of query's dtype, or flat heads; a token is contiguous.
        window: positions that a token sees, itself included; None: all before it.
        programs: as of ``TileCut``; None: all of ``items`` are there, and none of them is a piece.
        k_scale: what the cache's keys must be multiplied by.
        v_scale: the same of the values.
    """
    _, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = cache.shape
    dim_tile = triton.next_power_of_2(head_dim)
    assert cache.is_contiguous()
    assert query.stride()[1:] == (head_dim, 1)
    assert heads // kv_heads <= config.rows
    assert config.rows <= MAX_ROWS
    assert config.rows * dim_tile <= MAX_CELLS
    if len(items) == 1:
        return
    num_items = len(items) - 1
    _prefill_kernel[(num_items, kv_heads) if programs is None else (min(programs, num_items * kv_heads),)](
        query,
        cache,
        output,
        items,
        block_tables,
        workspace.values,
        workspace.statistics,
        workspace.arrivals,
        scale * k_scale * LOG2_E,
        v_scale,
        window or 0,
        query.stride(0),
        output.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_TILE=dim_tile,
        BLOCK_SIZE=block_size,
        ROWS=config.rows,
        KEYS=config.keys,
        HAS_WINDOW=window is not None,
        IN_TURNS=programs is not None,
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


@triton.jit
def _leave_piece(
    maximum,
    total,
    values,
    values_ptr,
    statistics_ptr,
    arrivals_ptr,
    piece,
    pieces,
    first_piece,
    head,
    KV_HEADS: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store a piece's result. Returns what all of them sum up to, and whether this program is the last to arrive."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_TILE)
    cell = row[:, None] * DIM_TILE + dim[None, :]
    place = (first_piece * KV_HEADS + head).to(tl.int64)
    mine = place + piece * KV_HEADS
    tl.store(values_ptr + mine * (ROWS * DIM_TILE) + cell, values)
    tl.store(statistics_ptr + mine * (2 * ROWS) + row, maximum)
    tl.store(statistics_ptr + mine * (2 * ROWS) + ROWS + row, total)
    # All threads' stores come before the count, and all loads of the last to arrive after it.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel", scope="gpu") == pieces - 1
    tl.debug_barrier()
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, DIM_TILE), tl.float32)
    if is_last:
        for other in range(pieces):
            place_of_other = place + other * KV_HEADS
            other_maximum = tl.load(statistics_ptr + place_of_other * (2 * ROWS) + row, cache_modifier=".cg")
            other_total = tl.load(statistics_ptr + place_of_other * (2 * ROWS) + ROWS + row, cache_modifier=".cg")
            other_values = tl.load(values_ptr + place_of_other * (ROWS * DIM_TILE) + cell, cache_modifier=".cg")
            new_maximum = tl.maximum(maximum, other_maximum)
            # A piece that a window hides from a row has a maximum of minus infinity.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            decay, weight = tl.exp2(maximum - reference), tl.exp2(other_maximum - reference)
            total = total * decay + other_total * weight
            values = values * decay[:, None] + other_values * weight[:, None]
            maximum = new_maximum
        tl.store(arrivals_ptr + place, 0)
    return total, values, is_last


@triton.jit
def _attend_item(
    query_ptr, cache_ptr, output_ptr, item_ptr, is_there, head, block_tables_ptr, values_ptr, statistics_ptr,
    arrivals_ptr, scale, v_scale, window, query_stride, output_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, IN_TURNS: tl.constexpr,
):  # fmt: skip
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_TILE)
    token = row // GROUP
    slot = tl.load(item_ptr, is_there, other=0)
    first_token = tl.load(item_ptr + 1, is_there, other=0)
    tokens = tl.load(item_ptr + 2, is_there, other=0)
    first_position = tl.load(item_ptr + 3, is_there, other=0)
    place = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    global_token = (first_token + token).to(tl.int64)[:, None]
    is_element = (token < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + global_token * query_stride + place, is_element, other=0.0)

    position = first_position + token
    context = first_position + tokens
    begin, end = 0, context
    if IN_TURNS:
        begin = tl.load(item_ptr + 4, is_there, other=0)
        end = tl.load(item_ptr + 5, is_there, other=0)
    table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
    head_ptr = cache_ptr + head * (BLOCK_SIZE * HEAD_DIM)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, DIM_TILE), tl.float32)
    if HAS_WINDOW:
        masked_from = tl.maximum(begin, tl.maximum(first_position + 1 - window, 0) // KEYS * KEYS)
    else:
        masked_from = (first_position + 1) // KEYS * KEYS
        if IN_TURNS:
            # ``end`` is a multiple of KEYS, too, unless it is that of the context.
            masked_from = tl.minimum(tl.maximum(begin, masked_from), end)
        maximum, total, values = attend_keys(
            maximum, total, values, query, head_ptr, table_ptr, begin, masked_from, position, context, window, scale,
            KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, KEYS, False, False,
        )  # fmt: skip
    maximum, total, values = attend_keys(
        maximum, total, values, query, head_ptr, table_ptr, masked_from, end, position, context, window, scale,
        KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, KEYS, HAS_WINDOW, True,
    )  # fmt: skip
    if IN_TURNS:
        pieces = tl.load(item_ptr + 6, is_there, other=1)
        is_whole = pieces <= 1
        if pieces > 1:
            total, values, is_whole = _leave_piece(
                maximum, total, values, values_ptr, statistics_ptr, arrivals_ptr, tl.load(item_ptr + 7), pieces,
                tl.load(item_ptr + 8), head, KV_HEADS, DIM_TILE, ROWS,
            )  # fmt: skip
        is_element &= is_whole
    # Rows beyond the last token may have seen nothing in their window.
    result = values * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(output_ptr + global_token * output_stride + place, result.to(output_ptr.dtype.element_ty), is_element)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["table_stride", "items_ptr"])
def _prefill_kernel(
    query_ptr,
    cache_ptr,
    output_ptr,
    items_ptr,
    block_tables_ptr,
    values_ptr,
    statistics_ptr,
    arrivals_ptr,
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
    IN_TURNS: tl.constexpr,
):
    if IN_TURNS:
        program, programs = tl.program_id(0), tl.num_programs(0)
        units = tl.load(items_ptr) * KV_HEADS
        for turn in range(tl.cdiv(units, programs)):
            unit = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
            # Heads vary fastest: programs that run side by side read the same blocks.
            _attend_item(
                query_ptr, cache_ptr, output_ptr, items_ptr + COLUMNS * (1 + unit // KV_HEADS), unit < units,
                unit % KV_HEADS, block_tables_ptr, values_ptr, statistics_ptr, arrivals_ptr, scale, v_scale, window,
                query_stride, output_stride, table_stride,
                KV_HEADS, GROUP, HEAD_DIM, DIM_TILE, BLOCK_SIZE, ROWS, KEYS, HAS_WINDOW, IN_TURNS,
            )  # fmt: skip
    else:
        _attend_item(
            query_ptr, cache_ptr, output_ptr, items_ptr + COLUMNS * (1 + tl.program_id(0)), True, tl.program_id(1),
            block_tables_ptr, values_ptr, statistics_ptr, arrivals_ptr, scale, v_scale, window,
            query_stride, output_stride, table_stride,
            KV_HEADS, GROUP, HEAD_DIM, DIM_TILE, BLOCK_SIZE, ROWS, KEYS, HAS_WINDOW, IN_TURNS,
        )  # fmt: skip
