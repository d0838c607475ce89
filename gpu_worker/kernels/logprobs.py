"""Log-probabilities of sampled and of the most probable tokens: log_softmax in float32 of the unchanged logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.sampling_layout import (
    CHANGED,
    FLAGS,
    LOGPROBS,
    LOGPROBS_COUNT,
    MOST_LOGPROBS,
    RECORD,
    RESULT,
)
from gpu_worker.kernels.sampling_noise import id_of, ranked, value_of

TILE = 4096
COLUMNS = 32
"""Room for the most probable tokens of a tile: the power of two from ``MOST_LOGPROBS`` on."""
BLOCK = 4096
PROGRAMS = 1024
"""Programs that are enough to fill a GPU; with more, those of rows that want nothing would take time."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
LAST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


class LogprobSummary(NamedTuple):
    """What is taken from the logits before the sampler changes them, of rows that want log-probabilities."""

    sums: torch.Tensor
    """[2, rows, tiles] float32: the maximum of each tile, and the sum of exp relative to it."""
    best: torch.Tensor
    """[rows, tiles, COLUMNS] int64: the most probable tokens of each tile, ``sampling_noise.ranked``."""
    raw: torch.Tensor
    """[rows, vocabulary] float32: the logits of rows that will be changed."""


def summarise_logprobs(logits: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> LogprobSummary:
    """The first half, before anything changes the logits.

    Args:
        logits: [rows, vocabulary] float32, unchanged.
        slots: [rows] int32.
        records: [slots, RECORD] int32 of ``sampling_layout``.
    """
    rows, size = logits.shape
    tiles, device = triton.cdiv(size, TILE), logits.device
    summary = LogprobSummary(
        torch.empty((2, rows, tiles), dtype=torch.float32, device=device),
        torch.empty((rows, tiles, COLUMNS), dtype=torch.int64, device=device),
        torch.empty((rows, size), dtype=torch.float32, device=device),
    )
    if rows:
        _summarise_kernel[(min(tiles, max(1, PROGRAMS // rows)), rows)](
            logits,
            logits.stride(0),
            slots,
            records,
            *summary,
            size,
            rows,
            tiles,
            RECORD=RECORD,
            TILE=TILE,
            COLUMNS=COLUMNS,
            num_warps=8,
        )
    return summary


def gather_logprobs(
    logits: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    tokens: torch.Tensor,
    summary: LogprobSummary,
) -> torch.Tensor:
    """The second half: rank and log-probability of the tokens, and the most probable tokens, the lowest id first.

    ``log_softmax`` is ``(logit - max) - log(sum(exp(logits - max)))``; a rank is 1 more than the number of tokens whose
    log-probability is larger.

    Args:
        logits: [rows, vocabulary] float32; changed only in rows that ``summary.raw`` has.
        tokens: [rows] int32, the sampled ones.

    Returns:
        [rows, RESULT] int32: rank, ids, log-probabilities (``sampling_layout.RESULT``); the rows and the entries that
        are not wanted are not written.
    """
    rows, size = logits.shape
    results = torch.empty((rows, RESULT), dtype=torch.int32, device=logits.device)
    if rows:
        tiles = triton.cdiv(size, TILE)
        _gather_kernel[(rows,)](
            logits,
            logits.stride(0),
            slots,
            records,
            tokens,
            *summary,
            results,
            size,
            rows,
            tiles,
            RECORD=RECORD,
            RESULT=RESULT,
            ENTRIES=MOST_LOGPROBS + 1,
            TILES=triton.next_power_of_2(tiles),
            COLUMNS=COLUMNS,
            BLOCK=BLOCK,
            num_warps=16,
        )
    return results


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _summarise_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    sums_ptr,
    best_ptr,
    raw_ptr,
    size,
    rows,
    tiles,
    RECORD: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(1)
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    flags = tl.load(record_ptr + FLAGS)
    if (flags & LOGPROBS) == 0:
        return
    count = tl.load(record_ptr + LOGPROBS_COUNT)
    logits_ptr += row.to(tl.int64) * stride
    raw_ptr += row.to(tl.int64) * size
    best_ptr += row.to(tl.int64) * tiles * COLUMNS
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + ids, ids < size, other=float("-inf"))
        tl.store(raw_ptr + ids, logits, (ids < size) & ((flags & CHANGED) != 0))
        largest = tl.maximum(tl.max(logits, 0), LOWEST)
        tl.store(sums_ptr + row * tiles + tile, largest)
        tl.store(sums_ptr + (rows + row) * tiles + tile, tl.sum(tl.exp(logits - largest), 0))
        keys = tl.where(ids < size, ranked(logits, ids), LAST_KEY)
        for column in range(count):
            best = tl.max(keys, 0)
            tl.store(best_ptr + tile * COLUMNS + column, best)
            keys = tl.where(keys == best, LAST_KEY, keys)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "tokens_ptr"])
def _gather_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    tokens_ptr,
    sums_ptr,
    best_ptr,
    raw_ptr,
    results_ptr,
    size,
    rows,
    tiles,
    RECORD: tl.constexpr,
    RESULT: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    flags = tl.load(record_ptr + FLAGS)
    if (flags & LOGPROBS) == 0:
        return
    source_ptr = logits_ptr + row * stride
    if flags & CHANGED:
        source_ptr = raw_ptr + row * size
    tile = tl.arange(0, TILES)
    tile_largest = tl.load(sums_ptr + row * tiles + tile, tile < tiles, other=LOWEST)
    tile_totals = tl.load(sums_ptr + (rows + row) * tiles + tile, tile < tiles, other=0.0)
    largest = tl.max(tile_largest, 0)
    log_total = tl.log(tl.sum(tile_totals * tl.exp(tile_largest - largest), 0))
    token = tl.load(tokens_ptr + row)
    logprob = (tl.load(source_ptr + token) - largest) - log_total
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(source_ptr + ids, ids < size, other=float("-inf"))
        above += ((logits - largest) - log_total > logprob).to(tl.int32)
    results_ptr += row * RESULT
    logprobs_ptr = results_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + 1 + ENTRIES
    tl.store(results_ptr, 1 + tl.sum(above, 0))
    tl.store(results_ptr + 1, token)
    tl.store(logprobs_ptr, logprob)
    count = tl.load(record_ptr + LOGPROBS_COUNT)
    place = tl.arange(0, TILES * COLUMNS)
    mask = (place // COLUMNS < tiles) & (place % COLUMNS < count)
    keys = tl.load(best_ptr + row * tiles * COLUMNS + place, mask, other=LAST_KEY)
    for entry in range(1, count + 1):
        best = tl.max(keys, 0)
        tl.store(results_ptr + 1 + entry, id_of(best))
        tl.store(logprobs_ptr + entry, (value_of(best) - largest) - log_total)
        keys = tl.where(keys == best, LAST_KEY, keys)
