"""How attention is divided among programs: decode rows on the device, once a step; prefill tiles on the host.

Decode rows have very different contexts, and neither a program per row nor a fixed number of splits keeps a GPU busy.
The context of all rows is laid end to end in *units* of a tile of tokens, and each of P programs (for each KV head)
takes an equal run of them ("stream-K", Osama et al., 2023; "lean attention", Sanovar et al., 2024):

    rows        |---- 0 ----|-- 1 --|1|------------ 3 ------------|
    programs    |   0   |   1   |   2   |   3   |   4   |   5   | 6

A row that one program covers is finished by it. Of another one, each program leaves a *partial* result, at most one at
the start of its run (slot 2p) and one at the end (slot 2p + 1), and the last program that arrives combines them. With
fewer units than programs, the first ones get one each and the others return at once.

Where rows are so alike that it ends sooner, the division is *aligned*: each program has a part of one row, or all of
it, so that it begins but once and few rows are joined. The plan decides, by the contexts.

Rows that begin alike may have the tokens in common read by a pass of their own (``prefix_pass``): then their units are
those of the rest, and whoever finishes a row joins what that pass has left.

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

from gpu_worker.kernels.programmatic_launch import pdl_options, start_after_previous

Int32 = npt.NDArray[np.int32]

PROGRAMS_OF_A_BLOCK = 8
LEAST_ROWS = 256
"""That the plan kernel is compiled for."""
MOST_PARTS = tl.constexpr(16)
"""Of a row in the aligned division."""
PART_TILES = tl.constexpr(4)
"""That a part has at least, so that joining the parts does not take longer than computing them."""
FEW_ROWS, FEW_ROWS_PARTS = tl.constexpr(4), tl.constexpr(8)
"""Few rows leave most of the GPU without work: so many parts for each, of a single tile if need be."""


@dataclasses.dataclass(slots=True)
class DecodePlan:
    """The division of one step's decode rows; made by ``plan_decode`` and read by ``decode`` in every layer.

    The tensors are allocated once and are rewritten by every step.
    """

    programs: torch.Tensor
    """[P or max_rows, 8] int32: first row, first unit within the row, units, iterations of the walk over them (one for
    each row, or in the batch-invariant mode for each unit, and one for each row without a context in between); context,
    slot and ``load_prefix`` of the first row."""
    row_parts: torch.Tensor
    """[max_rows, 2] int32: slot of the first partial, and how many programs share the row."""
    tile: int
    """Tokens."""
    num_balanced: int
    """P."""
    programs_per_sm: int
    split_tiles: int
    """Tiles of a unit in the batch-invariant mode; 0: balanced or aligned."""
    window: int
    """Positions that a token sees, itself included; 0: all before it."""

    def num_programs(self, rows: int) -> int:
        """Programs to launch for each KV head."""
        return self.num_balanced if self.split_tiles else max(self.num_balanced, rows)


def make_decode_plan(
    num_programs: int,
    max_rows: int,
    tile: int,
    device: torch.device,
    *,
    programs_per_sm: int = 1,
    split_tiles: int = 0,
    window: int | None = None,
) -> DecodePlan:
    """Allocate a plan.

    Args:
        num_programs: P, programs for each KV head that run at once: (multiprocessors * programs_per_sm) / kv_heads.
    """
    most = num_programs if split_tiles else max(num_programs, max_rows)
    programs = torch.zeros((most, 8), dtype=torch.int32, device=device)
    row_parts = torch.zeros((max_rows, 2), dtype=torch.int32, device=device)
    return DecodePlan(programs, row_parts, tile, num_programs, programs_per_sm, split_tiles, window or 0)


def plan_decode(
    plan: DecodePlan, slots: torch.Tensor, context_lens: torch.Tensor, prefixes: torch.Tensor | None = None
) -> None:
    """Fill ``plan`` for rows with these contexts. One small kernel; needs nothing on the host.

    Args:
        slots: [rows] int32 on the device.
        context_lens: [rows] int32 on the device, tokens that a row sees, itself included; 0: the row has no work.
        prefixes: [at least rows, 4] int32 on the device, the rows of ``shared_prefix.PrefixLayout``, whose common
            tokens are left out; None: there are none.
    """
    rows, num_programs = len(context_lens), plan.num_programs(len(context_lens))
    assert rows <= len(plan.row_parts)
    assert prefixes is None or (rows <= len(prefixes) and not plan.split_tiles and not plan.window)
    if not rows:
        return
    _plan_kernel[(1 + triton.cdiv(num_programs, PROGRAMS_OF_A_BLOCK),)](
        slots,
        context_lens,
        plan.programs,
        plan.row_parts,
        prefixes,
        rows,
        num_programs,
        plan.num_balanced,
        plan.window,
        TILE=plan.tile,
        PER_SM=plan.programs_per_sm,
        SPLIT_TILES=plan.split_tiles,
        ROWS=triton.next_power_of_2(max(rows, LEAST_ROWS)),
        BLOCK=PROGRAMS_OF_A_BLOCK,
        HAS_PREFIXES=prefixes is not None,
        num_warps=4,
        **pdl_options(slots.device),
    )


@triton.jit
def load_prefix(prefixes_ptr, row, context, is_row):
    """Tokens at the beginning of a row's context that the pass over common tokens has read; never all of them."""
    tokens = tl.load(prefixes_ptr + 4 * row, is_row, other=0)
    return tl.where(tokens < context, tokens, 0)


@triton.jit
def visible_tiles(context, window, prefix, TILE: tl.constexpr):
    """The first tile that a query at the end of ``context`` tokens sees beyond its prefix, and how many from there."""
    first = tl.where(window > 0, tl.maximum(context - window, 0), prefix) // TILE
    return first, (context + TILE - 1) // TILE - first


@triton.jit
def _aligned_parts(
    units, total, num_balanced, PER_SM: tl.constexpr, SPLIT_TILES: tl.constexpr, HAS_PREFIXES: tl.constexpr
):
    """Parts of each row in the aligned division, and whether it is the faster one.

    One program on each SM is enough to keep the memory busy, so that all tiles take as long as ``total * PER_SM /
    num_balanced`` of them in one program, one after another. A part that is longer ends late; the balanced division
    costs about five tiles more, for the joins and for beginning another row (measured on an H200: 21.9 against 13.3 µs
    for 32 rows of 256 tokens). Rows beyond the programs that run at once begin when others end, in any order, so that
    the last one may end late by its whole length. With prefixes another row costs a program more: it joins what their
    pass has left.
    """
    active = tl.sum((units > 0).to(tl.int32), 0)
    spare = tl.maximum(num_balanced - active, 0)
    parts = 1 + (spare * units.to(tl.int64) // tl.maximum(total, 1)).to(tl.int32)
    if_many = (units + PART_TILES - 1) // PART_TILES
    if_few = tl.maximum(if_many, FEW_ROWS_PARTS)
    parts = tl.minimum(parts, tl.where(active <= FEW_ROWS, if_few, if_many))
    parts = tl.minimum(tl.minimum(parts, units), MOST_PARTS)
    longest = tl.max((units + parts - 1) // tl.maximum(parts, 1), 0)
    limit = total * PER_SM // num_balanced
    LATE: tl.constexpr = 2 if HAS_PREFIXES else 16
    is_aligned = longest <= 5 + tl.where(active > num_balanced, limit // LATE, limit)
    return parts, is_aligned & (SPLIT_TILES == 0)


@triton.jit
def _aligned_share(program, row, units, parts):
    """The row of each of some programs, and its units from begin to end; none for programs beyond all parts."""
    is_before = tl.cumsum(parts, 0)[None, :] <= program[:, None]
    first_row = tl.sum(is_before.to(tl.int32), 1)
    part = program - tl.sum(tl.where(is_before, parts[None, :], 0), 1)
    is_row = row[None, :] == first_row[:, None]
    row_units = tl.sum(tl.where(is_row, units[None, :], 0), 1)
    row_parts = tl.maximum(tl.sum(tl.where(is_row, parts[None, :], 0), 1), 1)
    return first_row, part * row_units // row_parts, (part + 1) * row_units // row_parts


@triton.jit(do_not_specialize=["rows", "num_programs", "num_balanced", "window"])
def _plan_kernel(
    slots_ptr, context_lens_ptr, programs_ptr, row_parts_ptr, prefixes_ptr, rows, num_programs, num_balanced, window,
    TILE: tl.constexpr, PER_SM: tl.constexpr, SPLIT_TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_PREFIXES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_after_previous(PDL)
    row = tl.arange(0, ROWS)
    context = tl.load(context_lens_ptr + row, row < rows, other=0)
    prefix = load_prefix(prefixes_ptr, row, context, row < rows) if HAS_PREFIXES else 0
    _, units = visible_tiles(context, window, prefix, TILE)
    if SPLIT_TILES:
        units = (units + SPLIT_TILES - 1) // SPLIT_TILES
    ends = tl.cumsum(units, 0)
    starts = ends - units
    total = tl.sum(units, 0).to(tl.int64)
    busy = tl.minimum(total, num_balanced)
    parts_of_rows, is_aligned = _aligned_parts(units, total, num_balanced, PER_SM, SPLIT_TILES, HAS_PREFIXES)
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
            slots = tl.where(is_aligned, 2 * (tl.cumsum(parts_of_rows, 0) - parts_of_rows).to(tl.int64), slots)
            parts = tl.where(is_aligned, parts_of_rows.to(tl.int64), parts)
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
        if is_aligned:
            first_row, begin, end = _aligned_share(program, row, units, parts_of_rows)
            offset, last_row = begin, first_row
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
        first_context = tl.load(context_lens_ptr + first_row, first_row < rows, other=0)
        tl.store(place + 4, first_context, is_program)
        tl.store(place + 5, tl.load(slots_ptr + first_row, first_row < rows, other=0), is_program)
        if HAS_PREFIXES:
            tl.store(place + 6, load_prefix(prefixes_ptr, first_row, first_context, first_row < rows), is_program)
