"""The most probable logits of each row that is cut, by the maxima of groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.sampling_layout import CUT, FLAGS, RECORD, TOP_K, TOP_K_COUNT, TOP_P
from gpu_worker.kernels.sampling_noise import scale_of, sortable, unsortable

TILE = 2048
"""Logits that a program looks at together."""
GROUP = 32
"""Logits whose maximum is kept."""
MOST = 1024
"""The most groups that a row's candidates are taken from; a larger top-k is not among them."""
CANDIDATES = 4096
"""Room for the most probable logits of a row."""
PROGRAMS = 2048
"""Programs that are enough to fill a GPU; with more, those of rows without these features would take time."""
LOWEST = tl.constexpr(-3.4028234663852886e38)


class Candidates(NamedTuple):
    """Only rows with min-p, top-k or top-p are valid, and only those with the latter two have candidates."""

    largest: torch.Tensor
    """[rows] float32, the largest logit."""
    totals: torch.Tensor
    """[rows] float32, the sum of exp of the scaled logits relative to it."""
    floors: torch.Tensor
    """[rows] float32: all logits from here on are candidates."""
    counts: torch.Tensor
    """[rows] int32, of candidates; they are complete where this is not above ``CANDIDATES``."""
    values: torch.Tensor
    """[rows, CANDIDATES] float32, in any order."""


def collect_candidates(logits: torch.Tensor, slots: torch.Tensor, records: torch.Tensor, size: int) -> Candidates:
    """All logits not below the K-th largest maximum of groups of 32.

    There are at least K and seldom many more. K is top-k if that is at most ``MOST``, else ``MOST``.

    Args:
        logits: [rows, vocabulary] float32.
        slots: [rows] int32.
        records: [slots, RECORD] int32 of ``sampling_layout``.
        size: only ids below it can be sampled.
    """
    rows, device = len(logits), logits.device
    tiles = triton.cdiv(size, TILE)
    groups, splits = tiles * (TILE // GROUP), min(tiles, max(1, PROGRAMS // rows))
    maxima = torch.empty((rows, groups), dtype=torch.float32, device=device)
    sums = torch.empty((2, rows, tiles), dtype=torch.float32, device=device)
    # Each a multiple of 16 bytes: kernels are compiled anew for pointers that are not.
    row_floats = torch.empty((3, -(-rows // 4) * 4), dtype=torch.float32, device=device)[:, :rows]
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    largest, totals, floors = row_floats.unbind()
    values = torch.empty((rows, CANDIDATES), dtype=torch.float32, device=device)
    given = logits, logits.stride(0), slots, records
    _summarise_kernel[(splits, rows)](*given, maxima, sums, size, rows, tiles, RECORD=RECORD, TILE=TILE, GROUP=GROUP)
    _find_floor_kernel[(rows,)](
        slots,
        records,
        maxima,
        sums,
        largest,
        totals,
        floors,
        counts,
        rows,
        groups,
        tiles,
        RECORD=RECORD,
        GROUPS=triton.next_power_of_2(groups),
        TILES=triton.next_power_of_2(tiles),
        MOST=MOST,
        num_warps=8,
    )
    _collect_kernel[(splits, rows)](
        *given,
        maxima,
        floors,
        counts,
        values,
        size,
        tiles,
        RECORD=RECORD,
        TILE=TILE,
        GROUP=GROUP,
        CANDIDATES=CANDIDATES,
    )
    return Candidates(largest, totals, floors, counts, values)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _summarise_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    maxima_ptr,
    sums_ptr,
    size,
    rows,
    tiles,
    RECORD: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The maximum of each group; of each tile, its maximum and the sum of exp relative to it."""
    row = tl.program_id(1)
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    if (tl.load(record_ptr + FLAGS) & CUT) == 0:
        return
    scale = scale_of(record_ptr)
    logits_ptr += row.to(tl.int64) * stride
    groups = tl.arange(0, TILE // GROUP)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        ids = tile * TILE + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logits = tl.load(logits_ptr + ids, ids < size, other=float("-inf"))
        maxima = tl.max(logits, 1)
        tl.store(maxima_ptr + (row.to(tl.int64) * tiles + tile) * (TILE // GROUP) + groups, maxima)
        largest = tl.maximum(tl.max(maxima, 0), LOWEST)
        tl.store(sums_ptr + row * tiles + tile, largest)
        total = tl.sum(tl.sum(tl.exp((logits - largest) * scale), 1), 0)
        tl.store(sums_ptr + (rows + row) * tiles + tile, total)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _find_floor_kernel(
    slots_ptr,
    records_ptr,
    maxima_ptr,
    sums_ptr,
    largest_ptr,
    totals_ptr,
    floors_ptr,
    counts_ptr,
    rows,
    groups,
    tiles,
    RECORD: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    MOST: tl.constexpr,
):
    """The row's maximum and sum of exp; from where on logits are candidates; no candidate is counted yet."""
    row = tl.program_id(0)
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    flags = tl.load(record_ptr + FLAGS)
    if (flags & CUT) == 0:
        return
    tile = tl.arange(0, TILES)
    tile_largest = tl.load(sums_ptr + row * tiles + tile, tile < tiles, other=LOWEST)
    tile_totals = tl.load(sums_ptr + (rows + row) * tiles + tile, tile < tiles, other=0.0)
    largest = tl.max(tile_largest, 0)
    tl.store(largest_ptr + row, largest)
    # A tile without any token is far below the others, but finite.
    below = tl.maximum(tile_largest - largest, -1e30)
    tl.store(totals_ptr + row, tl.sum(tile_totals * tl.exp(below * scale_of(record_ptr)), 0))
    tl.store(counts_ptr + row, 0)
    if (flags & (TOP_K | TOP_P)) == 0:
        return
    wanted = MOST
    if flags & TOP_K:
        top_k = tl.load(record_ptr + TOP_K_COUNT)
        wanted = tl.where(top_k <= MOST, top_k, MOST)
    group = tl.arange(0, GROUPS)
    lowest = tl.full((), LOWEST, tl.float32)
    keys = sortable(tl.load(maxima_ptr + row.to(tl.int64) * groups + group, group < groups, other=lowest))
    keys = tl.where(group < groups, keys, -0x80000000)
    # At least `wanted` groups are not below `low`, unless there are fewer.
    low = sortable(lowest).to(tl.int64)
    high = sortable(largest).to(tl.int64)
    found = groups
    while (low < high) & (found > wanted + wanted // 4):
        middle = low + (high - low + 1) // 2
        above = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = above >= wanted
        found = tl.where(enough, above, found)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    tl.store(floors_ptr + row, unsortable(low.to(tl.int32)))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _collect_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    maxima_ptr,
    floors_ptr,
    counts_ptr,
    candidates_ptr,
    size,
    tiles,
    RECORD: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Logits not below the floor to the candidates, as far as there is room, in any order; all are counted."""
    row = tl.program_id(1)
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    if (tl.load(record_ptr + FLAGS) & (TOP_K | TOP_P)) == 0:
        return
    floor = tl.load(floors_ptr + row)
    logits_ptr += row.to(tl.int64) * stride
    candidates_ptr += row.to(tl.int64) * CANDIDATES
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        groups = (row.to(tl.int64) * tiles + tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        if tl.max(tl.load(maxima_ptr + groups), 0) >= floor:
            ids = tile * TILE + tl.arange(0, TILE)
            logits = tl.load(logits_ptr + ids, ids < size, other=float("-inf"))
            kept = (logits >= floor).to(tl.int32)
            place = tl.cumsum(kept, 0) - 1 + tl.atomic_add(counts_ptr + row, tl.sum(kept, 0), sem="relaxed")
            tl.store(candidates_ptr + place, logits, (kept != 0) & (place < CANDIDATES))
