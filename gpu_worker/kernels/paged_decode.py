"""Decode attention over the paged KV cache: one query token a row, flash decoding with a balanced division of the work.

FlashAttention's online softmax (Dao et al., 2022), split over the context (Flash-Decoding, 2023) as
``attention_plan`` says. The heads that share a KV head are the rows of one product. What many rows have in common at
their beginning may have been read already (``prefix_pass``).
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.attention_plan import DecodePlan, load_prefix, visible_tiles
from gpu_worker.kernels.fp8 import add_products, interleave, load_pairs, multiply_keys, split_query
from gpu_worker.kernels.prefix_pass import PrefixPartials
from gpu_worker.kernels.programmatic_launch import pdl_options, start_after_previous

LOG2_E = math.log2(math.e)
COMBINED_ELEMENTS = 2048
"""Partial results that a program holds at once when it combines them, in float32 elements."""
EMPTY_ROWS = 8
"""That a program looks for at once."""
KV_TILE_BYTES = 16384
"""Of the keys of a tile: with those of the values and two stages 64 KiB, an SM holds three programs."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and launched."""

    tile: int
    """Tokens of the context in one iteration."""
    num_warps: int
    num_stages: int
    programs_per_sm: int

    @property
    def max_registers(self) -> int:
        """Of a thread, so that an SM's 65,536 suffice for its programs."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


def decode_config(head_dim: int, cache_dtype: torch.dtype) -> DecodeConfig:
    """The configuration for a shape."""
    tile = min(max(KV_TILE_BYTES // (triton.next_power_of_2(head_dim) * max(2, cache_dtype.itemsize)), 16), 128)
    return DecodeConfig(tile, num_warps=4, num_stages=3, programs_per_sm=4 if cache_dtype.itemsize == 1 else 3)


@dataclasses.dataclass(slots=True)
class DecodeWorkspace:
    """Partial results of programs that share a row; allocated once, shared by all layers of a device's stream."""

    values: torch.Tensor
    """[slots, heads, head_dim] float32: sums of exp2(score - maximum) * value."""
    statistics: torch.Tensor
    """[slots, heads, 2] float32: maximum of the scores (to base 2), sum of exp2(score - maximum)."""
    arrivals: torch.Tensor
    """[max_rows, kv_heads] int32: programs that have left their partial of a row; zero between launches."""


def make_decode_workspace(
    slots: int, max_rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """Allocate a workspace.

    Args:
        slots: 2 * P of the plan, or 2 * max_rows if that is more and rows have prefixes; with ``split_tiles`` the most
            units that a step can have.
    """
    return DecodeWorkspace(
        values=torch.empty((slots, heads, head_dim), dtype=torch.float32, device=device),
        statistics=torch.empty((slots, heads, 2), dtype=torch.float32, device=device),
        arrivals=torch.zeros((max_rows, kv_heads), dtype=torch.int32, device=device),
    )


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    output: torch.Tensor,
    scale: float,
    config: DecodeConfig,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    prefixes: PrefixPartials | None = None,
) -> None:
    """``softmax(q @ k.T * scale) @ v`` of each row over its context, for each head; scores and sums in float32.

    Rows without a context get zeros. ``plan`` must have been made for these contexts with ``plan_decode``.

    Args:
        query: [rows, heads, head_dim] of the model's dtype; a row's heads are contiguous.
        cache: [blocks, 2, kv_heads, block_size, head_dim], keys first, contiguous; of query's dtype or float8_e4m3fn.
        slots: [rows] int32, rows of ``block_tables``.
        context_lens: [rows] int32.
        block_tables: [slots, max_blocks] int32, rows contiguous.
        output: [rows, heads, head_dim] of query's dtype, or flat heads; a row is contiguous.
        k_scale: what the cache's keys must be multiplied by.
        v_scale: the same of the values.
        prefixes: what ``prefix_pass.attend_prefixes`` has left of these rows; ``plan`` must have been made with it.
    """
    rows, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = cache.shape
    group, num_programs = heads // kv_heads, plan.num_programs(rows)
    assert cache.is_contiguous()
    assert query.stride()[1:] == (head_dim, 1)
    least_slots = 2 * (num_programs if prefixes else plan.num_balanced)
    assert len(workspace.values) >= (least_slots if not plan.split_tiles else 1)
    if not rows:
        return
    # Half of the dims of float8 are the depth of a product, which is 16 at least.
    group_tile, dim_tile = triton.next_power_of_2(group), max(32, triton.next_power_of_2(head_dim))
    _decode_kernel[(num_programs * kv_heads,)](
        query, cache, output, slots, context_lens, block_tables, plan.programs, plan.row_parts,
        workspace.values, workspace.statistics, workspace.arrivals,
        *(prefixes or (None, None, None)),
        scale * k_scale * LOG2_E, v_scale, rows, num_programs, plan.window,
        query.stride(0), output.stride(0), block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_TILE=group_tile,
        HEAD_DIM=head_dim,
        DIM_TILE=dim_tile,
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        SPLIT_TILES=plan.split_tiles,
        EMPTY_ROWS=EMPTY_ROWS,
        PARTS=max(1, COMBINED_ELEMENTS // (group_tile * dim_tile)),
        PREFIX_ROWS=prefixes.values.shape[2] if prefixes else 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **pdl_options(query.device),
    )  # fmt: skip


@triton.jit
def _zero_rows(
    output_ptr,
    row,
    is_empty,
    head,
    output_stride,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, GROUP_TILE * DIM_TILE)
    is_element = (column // DIM_TILE < GROUP) & (column % DIM_TILE < HEAD_DIM)
    place = head * GROUP * HEAD_DIM + column // DIM_TILE * HEAD_DIM + column % DIM_TILE
    zeros = tl.zeros((ROWS, GROUP_TILE * DIM_TILE), output_ptr.dtype.element_ty)
    pointers = output_ptr + row.to(tl.int64)[:, None] * output_stride + place[None, :]
    tl.store(pointers, zeros, is_empty[:, None] & is_element[None, :])


@triton.jit
def _load_block(table_ptr, tile, context, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of each token of a tile; one for all of them, if a block holds whole tiles."""
    token = tile * TILE if BLOCK_SIZE % TILE == 0 else tile * TILE + tl.arange(0, TILE)
    return tl.load(table_ptr + token // BLOCK_SIZE, token < context, other=0)


@triton.jit
def _attend_tiles(
    query,
    cache_ptr,
    table_ptr,
    begin,
    end,
    context,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """Online softmax over the tiles from ``begin`` to ``end``; ``cache_ptr`` is that of the KV head in block 0."""
    dim = tl.arange(0, DIM_TILE)
    maximum = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((ROW_TILE,), tl.float32)
    IS_FP8: tl.constexpr = cache_ptr.dtype.element_ty == tl.float8e4nv
    values = tl.zeros((ROW_TILE, DIM_TILE // 2 if IS_FP8 else DIM_TILE), tl.float32)
    odd_values = tl.zeros_like(values)
    if IS_FP8:
        even_query, odd_query = split_query(query)
    first_visible = tl.where(window > 0, context - window, 0)
    # Block indices are read an iteration ahead: the loads of keys and values then depend on no load of their own
    # iteration, and the compiler gives them all stages of its pipeline.
    block = _load_block(table_ptr, begin, context, BLOCK_SIZE, TILE)
    for tile in tl.range(begin, end):
        next_block = _load_block(table_ptr, tile + 1, context, BLOCK_SIZE, TILE)
        token = tile * TILE + tl.arange(0, TILE)
        is_visible = (token < context) & (token >= first_visible)
        place = block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + token % BLOCK_SIZE * HEAD_DIM
        if IS_FP8:
            key = load_pairs(cache_ptr, place, is_visible, HEAD_DIM, DIM_TILE)
            value = load_pairs(cache_ptr, place + KV_HEADS * BLOCK_SIZE * HEAD_DIM, is_visible, HEAD_DIM, DIM_TILE)
            scores = multiply_keys(even_query, odd_query, key)
        else:
            pointers = cache_ptr + place[:, None] + dim[None, :]
            mask = is_visible[:, None]
            if HEAD_DIM != DIM_TILE:
                mask &= (dim < HEAD_DIM)[None, :]
            key = tl.load(pointers, mask, other=0.0)
            value = tl.load(pointers + KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask, other=0.0)
            scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        scores = tl.where(is_visible[None, :], scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        probabilities = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(probabilities, 1)
        values = values * decay[:, None]
        if IS_FP8:
            values, odd_values = add_products(values, odd_values * decay[:, None], probabilities, value)
        else:
            values = tl.dot(probabilities.to(query.dtype), value.to(query.dtype), values, input_precision="ieee")
        maximum, block = new_maximum, next_block
    return maximum, total, interleave(values, odd_values) if IS_FP8 else values


@triton.jit
def _join_parts(
    maximum, total, values, values_ptr, statistics_ptr, place, is_part, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr
):  # fmt: skip
    """Join partials [PARTS, GROUP_TILE] at ``place`` to what there is of each member."""
    dim = tl.arange(0, DIM_TILE)
    is_part = is_part[:, None]
    part_maximum = tl.load(statistics_ptr + 2 * place, is_part, other=float("-inf"), cache_modifier=".cg")
    part_total = tl.load(statistics_ptr + 2 * place + 1, is_part, other=0.0, cache_modifier=".cg")
    part_values = tl.load(
        values_ptr + place[:, :, None] * HEAD_DIM + dim[None, None, :],
        is_part[:, :, None] & (dim < HEAD_DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
    weight = tl.exp2(part_maximum - new_maximum[None, :])
    decay = tl.exp2(maximum - new_maximum)
    total = total * decay + tl.sum(part_total * weight, 0)
    values = values * decay[:, None] + tl.sum(part_values * weight[:, :, None], 0)
    return new_maximum, total, values


@triton.jit
def _combine(
    output_ptr, values_ptr, statistics_ptr, row, first_slot, parts, v_scale, head, prefixes_ptr, prefix_values_ptr,
    prefix_statistics_ptr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, IS_SPLIT: tl.constexpr, PARTS: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Join the partials of a row, in order, and store the row; ``output_ptr`` is that of the row."""
    member, dim = tl.arange(0, GROUP_TILE), tl.arange(0, DIM_TILE)
    within = tl.minimum(member, GROUP - 1)
    query_head = head * GROUP + within
    maximum = tl.full((GROUP_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    values = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    for begin in tl.range(0, parts, PARTS, num_stages=3):
        part = begin + tl.arange(0, PARTS)
        slot = first_slot + part if IS_SPLIT else tl.where(part == 0, first_slot, (first_slot // 2 + part) * 2)
        place = slot.to(tl.int64)[:, None] * (KV_HEADS * GROUP) + query_head[None, :]
        maximum, total, values = _join_parts(
            maximum, total, values, values_ptr, statistics_ptr, place, part < parts, HEAD_DIM, DIM_TILE
        )
    if PREFIX_ROWS:
        first_part, prefix_parts = tl.load(prefixes_ptr + 4 * row + 1), tl.load(prefixes_ptr + 4 * row + 2)
        packed_row = tl.load(prefixes_ptr + 4 * row + 3) * GROUP + within
        for begin in tl.range(0, prefix_parts, PARTS, num_stages=3):
            part = begin + tl.arange(0, PARTS)
            tile = (first_part + part).to(tl.int64) * KV_HEADS + head
            place = tile[:, None] * PREFIX_ROWS + packed_row[None, :]
            maximum, total, values = _join_parts(
                maximum, total, values, prefix_values_ptr, prefix_statistics_ptr, place, part < prefix_parts,
                HEAD_DIM, DIM_TILE,
            )  # fmt: skip
    result = values * (v_scale / total)[:, None]
    is_element = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    pointers = output_ptr + query_head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(pointers, result.to(output_ptr.dtype.element_ty), is_element)


@triton.jit
def _share(context, window, prefix, unit, units, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """The tiles, from begin to end, of a row's units that a program takes from ``unit`` on; taken units, all units."""
    first, tiles = visible_tiles(context, window, prefix, TILE)
    if SPLIT_TILES:
        row_units = (tiles + SPLIT_TILES - 1) // SPLIT_TILES
        taken = tl.minimum(row_units, 1)
        begin = first + unit * SPLIT_TILES
        end = tl.minimum(begin + SPLIT_TILES, first + tiles)
    else:
        row_units = tiles
        taken = tl.minimum(units, tiles - unit)
        begin = first + unit
        end = begin + taken
    return begin, end, taken, row_units


@triton.jit
def _leave_part(
    maximum, total, values, output_ptr, values_ptr, statistics_ptr, arrivals_ptr, row, part_slot, first_slot, parts,
    v_scale, head, prefixes_ptr, prefix_values_ptr, prefix_statistics_ptr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROW_TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr, PARTS: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Store a partial; the last to arrive combines all. ``output_ptr`` is that of the row."""
    member, dim = tl.arange(0, ROW_TILE), tl.arange(0, DIM_TILE)
    place = part_slot.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + member
    is_element = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(values_ptr + place[:, None] * HEAD_DIM + dim[None, :], values, is_element)
    tl.store(statistics_ptr + 2 * place, maximum, member < GROUP)
    tl.store(statistics_ptr + 2 * place + 1, total, member < GROUP)
    # All threads' stores come before the count, and all loads of the last to arrive after it.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.debug_barrier()
        _combine(
            output_ptr, values_ptr, statistics_ptr, row, first_slot, parts, v_scale, head, prefixes_ptr,
            prefix_values_ptr, prefix_statistics_ptr,
            KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM, DIM_TILE, IS_SPLIT, PARTS, PREFIX_ROWS,
        )  # fmt: skip
        tl.store(arrivals_ptr + row * KV_HEADS + head, 0)
        if PREFIX_ROWS:
            # A program with several whole rows leaves one after another in the same slot.
            tl.debug_barrier()


@triton.jit(
    do_not_specialize=["rows", "num_programs", "window"],
    do_not_specialize_on_alignment=["table_stride"],
)
def _decode_kernel(
    query_ptr, cache_ptr, output_ptr, slots_ptr, context_lens_ptr, block_tables_ptr, programs_ptr, row_parts_ptr,
    values_ptr, statistics_ptr, arrivals_ptr, prefixes_ptr, prefix_values_ptr, prefix_statistics_ptr,
    scale, v_scale, rows, num_programs, window, query_stride, output_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr,
    EMPTY_ROWS: tl.constexpr, PARTS: tl.constexpr, PREFIX_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_after_previous(PDL)
    # Heads vary fastest: programs that run side by side read the same blocks.
    program, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    first_row = tl.load(programs_ptr + 8 * program)
    unit = tl.load(programs_ptr + 8 * program + 1)
    units = tl.load(programs_ptr + 8 * program + 2)
    visits = tl.load(programs_ptr + 8 * program + 3)
    context = tl.load(programs_ptr + 8 * program + 4)
    slot = tl.load(programs_ptr + 8 * program + 5)
    prefix = tl.load(programs_ptr + 8 * program + 6) if PREFIX_ROWS else 0
    # Asked for here, so that the answer is there when the rows are written at the end.
    maybe_empty = program + tl.arange(0, EMPTY_ROWS) * num_programs
    is_empty = tl.load(context_lens_ptr + maybe_empty, maybe_empty < rows, other=1) == 0

    ROW_TILE: tl.constexpr = GROUP_TILE if GROUP_TILE > 16 else 16
    member, dim = tl.arange(0, ROW_TILE), tl.arange(0, DIM_TILE)
    is_element = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    place = (head * GROUP + member)[:, None] * HEAD_DIM + dim[None, :]
    head_ptr = cache_ptr + head * (BLOCK_SIZE * HEAD_DIM)
    row = first_row
    for _ in range(visits):
        query = tl.load(query_ptr + row.to(tl.int64) * query_stride + place, is_element, other=0.0)
        table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
        begin, end, taken, row_units = _share(context, window, prefix, unit, units, TILE, SPLIT_TILES)
        is_last = unit + taken == row_units
        is_alone = (taken == row_units) & (prefix == 0)
        # What is needed after the loop is read while it runs.
        first_slot = tl.load(row_parts_ptr + 2 * row)
        parts = tl.load(row_parts_ptr + 2 * row + 1)
        next_row = tl.where(is_last, row + 1, row)
        next_context = tl.load(context_lens_ptr + next_row, next_row < rows, other=0)
        next_slot = tl.load(slots_ptr + next_row, next_row < rows, other=0)
        if PREFIX_ROWS:
            next_prefix = load_prefix(prefixes_ptr, next_row, next_context, next_row < rows)
        maximum, total, values = _attend_tiles(
            query, head_ptr, table_ptr, begin, end, context, window, scale,
            KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, TILE, ROW_TILE,
        )  # fmt: skip
        row_ptr = output_ptr + row.to(tl.int64) * output_stride
        if is_alone:
            # A row without a context, met between two others, has a total of zero and is written below.
            result = values * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
            tl.store(row_ptr + place, result.to(output_ptr.dtype.element_ty), is_element & (taken > 0))
        else:
            part_slot = first_slot + unit if SPLIT_TILES else 2 * program + (row != first_row).to(tl.int32)
            _leave_part(
                maximum, total, values, row_ptr, values_ptr, statistics_ptr, arrivals_ptr, row, part_slot, first_slot,
                parts, v_scale, head, prefixes_ptr, prefix_values_ptr, prefix_statistics_ptr,
                KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM, DIM_TILE, ROW_TILE, SPLIT_TILES > 0, PARTS, PREFIX_ROWS,
            )  # fmt: skip
        units -= taken
        unit = tl.where(is_last, 0, unit + taken)
        row, context, slot = next_row, next_context, next_slot
        if PREFIX_ROWS:
            prefix = next_prefix
    _zero_rows(
        output_ptr, maybe_empty, is_empty, head, output_stride, GROUP, GROUP_TILE, HEAD_DIM, DIM_TILE, EMPTY_ROWS
    )  # fmt: skip
    for begin in range(EMPTY_ROWS * num_programs, rows, EMPTY_ROWS * num_programs):
        more = begin + maybe_empty
        is_empty = tl.load(context_lens_ptr + more, more < rows, other=1) == 0
        _zero_rows(output_ptr, more, is_empty, head, output_stride, GROUP, GROUP_TILE, HEAD_DIM, DIM_TILE, EMPTY_ROWS)
