"""How attention is divided among programs: decode rows on the device, once a step; prefill tiles on the host.

Decode rows have very different contexts, and neither a program per row nor a fixed number of splits keeps a GPU busy.
The context of all rows is laid end to end in *units* of a tile of tokens, and each of P programs (for each KV head)
takes an equal run of them ("stream-K", Osama et al., 2023; "lean attention", Sanovar et al., 2024):

    rows        |---- 0 ----|-- 1 --|1|------------ 3 ------------|
    programs    |   0   |   1   |   2   |   3   |   4   |   5   | 6

A row that one program covers is finished by it. Of another one, each program leaves a *partial* result, at most one at
the start of its run (slot 2p) and one at the end (slot 2p + 1), and the last program that arrives combines them. With
fewer units than programs, the first ones get one each and the others return at once.

In the batch-invariant mode a unit is a fixed number of tiles of a row, each one leaves a partial of its own (slot: the
number of the unit), and the order of all sums depends on the row's context alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Int32 = npt.NDArray[np.int32]

PROGRAMS_OF_A_BLOCK = 8
LEAST_ROWS = 256
"""That the plan kernel is compiled for."""


@dataclasses.dataclass(slots=True)
class DecodePlan:
    """The division of one step's decode rows; made by ``plan_decode`` and read by ``decode`` in every layer.

    The tensors are allocated once and are rewritten by every step.
    """

    programs: torch.Tensor
    """[P, 8] int32: first row, first unit within the row, units, iterations of the walk over them (one for each row, or
    in the batch-invariant mode for each unit, and one for each row without a context in between), context and slot of
    the first row."""
    row_parts: torch.Tensor
    """[max_rows, 2] int32: slot of the first partial, and how many programs share the row."""
    tile: int
    """Tokens."""
    split_tiles: int
    """Tiles of a unit in the batch-invariant mode; 0: balanced."""
    window: int
    """Positions that a token sees, itself included; 0: all before it."""


def make_decode_plan(
    num_programs: int,
    max_rows: int,
    tile: int,
    device: torch.device,
    *,
    split_tiles: int = 0,
    window: int | None = None,
) -> DecodePlan:
    """Allocate a plan.

    Args:
        num_programs: P, programs for each KV head: about (multiprocessors * programs on each) / kv_heads.
    """
    programs = torch.zeros((num_programs, 8), dtype=torch.int32, device=device)
    row_parts = torch.zeros((max_rows, 2), dtype=torch.int32, device=device)
    return DecodePlan(programs, row_parts, tile, split_tiles, window or 0)


def plan_decode(plan: DecodePlan, slots: torch.Tensor, context_lens: torch.Tensor) -> None:
    """Fill ``plan`` for rows with these contexts. One small kernel; needs nothing on the host.

    Args:
        slots: [rows] int32 on the device.
        context_lens: [rows] int32 on the device, tokens that a row sees, itself included; 0: the row has no work.
    """
    rows, num_programs = len(context_lens), len(plan.programs)
    assert rows <= len(plan.row_parts)
    if not rows:
        return
    _plan_kernel[(1 + triton.cdiv(num_programs, PROGRAMS_OF_A_BLOCK),)](
        slots,
        context_lens,
        plan.programs,
        plan.row_parts,
        rows,
        num_programs,
        plan.window,
        TILE=plan.tile,
        SPLIT_TILES=plan.split_tiles,
        ROWS=triton.next_power_of_2(max(rows, LEAST_ROWS)),
        BLOCK=PROGRAMS_OF_A_BLOCK,
        num_warps=4,
    )


@triton.jit
def visible_tiles(context, window, TILE: tl.constexpr):
    """The first tile that a query at the end of ``context`` tokens sees, and how many it sees from there."""
    first = tl.where(window > 0, tl.maximum(context - window, 0), 0) // TILE
    return first, (context + TILE - 1) // TILE - first


@triton.jit(do_not_specialize=["rows", "num_programs", "window"])
def _plan_kernel(
    slots_ptr,
    context_lens_ptr,
    programs_ptr,
    row_parts_ptr,
    rows,
    num_programs,
    window,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    context = tl.load(context_lens_ptr + row, row < rows, other=0)
    _, units = visible_tiles(context, window, TILE)
    if SPLIT_TILES:
        units = (units + SPLIT_TILES - 1) // SPLIT_TILES
    ends = tl.cumsum(units, 0)
    starts = ends - units
    total = tl.sum(units, 0).to(tl.int64)
    busy = tl.minimum(total, num_programs)
    if tl.program_id(0) == 0:
        if SPLIT_TILES:
            slots, parts = starts, units
        else:
            # Program p has the units from floor(p * total / busy) on; unit u is of ceil((u + 1) * busy / total) - 1.
            divisor = tl.maximum(total, 1)
            first = ((starts.to(tl.int64) + 1) * busy - 1) // divisor
            last = (ends.to(tl.int64) * busy - 1) // divisor
            begins_before = first * total // tl.maximum(busy, 1) < starts
            slots, parts = 2 * first + begins_before.to(tl.int64), last - first + 1
        tl.store(row_parts_ptr + 2 * row, slots.to(tl.int32), row < rows)
        tl.store(row_parts_ptr + 2 * row + 1, parts.to(tl.int32), row < rows)
    else:
        program = (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK)
        divisor = tl.maximum(busy, 1)
        begin = (tl.minimum(program, busy) * total // divisor).to(tl.int32)
        end = (tl.minimum(program + 1, busy) * total // divisor).to(tl.int32)
        is_before = ends[None, :] <= begin[:, None]
        first_row = tl.sum(is_before.to(tl.int32), 1)
        offset = begin - tl.sum(tl.where(is_before, units[None, :], 0), 1)
        last_row = tl.sum((ends[None, :] < end[:, None]).to(tl.int32), 1)
        place = programs_ptr + 8 * program
        is_program = program < num_programs
        tl.store(place, first_row, is_program)
        tl.store(place + 1, offset, is_program)
        tl.store(place + 2, end - begin, is_program)
        visits = last_row - first_row + 1
        if SPLIT_TILES:
            is_crossed = (row >= first_row[:, None]) & (row <= last_row[:, None]) & (units == 0)[None, :]
            visits = end - begin + tl.sum(is_crossed.to(tl.int32), 1)
        tl.store(place + 3, tl.where(end > begin, visits, 0), is_program)
        tl.store(place + 4, tl.load(context_lens_ptr + first_row, first_row < rows, other=0), is_program)
        tl.store(place + 5, tl.load(slots_ptr + first_row, first_row < rows, other=0), is_program)


def prefill_tiles(spans: Int32, tile_tokens: int) -> Int32:
    """Cut prefill spans in tiles of query tokens, those with most work first.

    Args:
        spans: [p, 4] int32: slot, first query token in the step, query tokens, context with the last of them included.
        tile_tokens: of a tile at most.

    Returns:
        [tiles, 4] int32: slot, first query token in the step, query tokens, position of the first one.
    """
    slots, starts, counts, contexts = spans.reshape(-1, 4).T.astype(np.int64)
    tiles = -(-counts // tile_tokens)
    span = np.repeat(np.arange(len(counts)), tiles)
    offset = (np.arange(len(span)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_tokens
    length = np.minimum(counts[span] - offset, tile_tokens)
    position = contexts[span] - counts[span] + offset
    table = np.stack([slots[span], starts[span] + offset, length, position], 1).astype(np.int32)
    return np.ascontiguousarray(table[np.argsort(-position, kind="stable")])
