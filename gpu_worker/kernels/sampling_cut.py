"""Where min-p, top-k and top-p cut each row, found without sorting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.sampling_candidates import CANDIDATES, LOWEST, MOST, collect_candidates
from gpu_worker.kernels.sampling_layout import (
    CUT,
    FLAGS,
    MIN_P,
    MIN_P_OFFSET,
    RECORD,
    TOP_K,
    TOP_K_COUNT,
    TOP_P,
    TOP_P_SUM,
)
from gpu_worker.kernels.sampling_noise import scale_of, sortable, unsortable

PIVOTS = 8
"""Places where a search looks at a time."""
CANDIDATES_BLOCK, ROW_BLOCK = 512, 2048
"""Logits that a search looks at together; the same for any number of rows, since the order of a sum depends on it."""
UNIT = tl.constexpr(4294967296.0)
"""Weights are probabilities relative to the largest one, times this."""


def find_cuts(logits: torch.Tensor, slots: torch.Tensor, records: torch.Tensor, size: int) -> torch.Tensor:
    """The least logit of each row that min-p, top-k and top-p, in this order, leave.

    That of top-k and top-p is the least one such that the larger ones weigh less than the target
    (``gpu_worker.sampling.threshold.least_kept``). It is searched among candidates (``sampling_candidates``). Where the
    cut is not among them, in a flat distribution, the search goes through the whole row: a pivot search as in
    FlashInfer's sorting-free sampling (2025), with more pivots at a time. Candidates come in any order, so that their
    probabilities are summed as integers.

    Args:
        logits: [rows, vocabulary] float32.
        slots: [rows] int32.
        records: [slots, RECORD] int32 of ``sampling_layout``.
        size: only ids below it can be sampled.

    Returns:
        [rows] float32; of a row without these features, the lowest float.
    """
    rows = len(logits)
    cuts = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return cuts
    candidates = collect_candidates(logits, slots, records, size)
    left = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _search_candidates_kernel[(rows,)](
        slots,
        records,
        *candidates,
        cuts,
        left,
        RECORD=RECORD,
        CANDIDATES=CANDIDATES,
        MOST=MOST,
        PIVOTS=PIVOTS,
        BLOCK=CANDIDATES_BLOCK,
        num_warps=8,
    )
    _search_rows_kernel[(rows,)](
        logits,
        logits.stride(0),
        slots,
        records,
        candidates.largest,
        candidates.totals,
        cuts,
        left,
        size,
        RECORD=RECORD,
        PIVOTS=PIVOTS,
        BLOCK=ROW_BLOCK,
        num_warps=16,
    )
    return cuts


@triton.jit
def _weights(logits, largest, scale):
    return tl.exp((logits - largest) * scale) * UNIT


@triton.jit
def _weight_from(values_ptr, size, least, largest, scale, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the values not below ``least``, int64; summed as ``DTYPE``."""
    total = tl.zeros((BLOCK,), DTYPE)
    for start in tl.range(0, size, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + at, at < size, other=float("-inf"))
        total += tl.where(values >= least, _weights(values, largest, scale).to(DTYPE), 0)
    return tl.sum(total, 0).to(tl.int64)


@triton.jit
def _least_kept(
    values_ptr,
    size,
    least,
    largest,
    scale,
    target,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least number from ``least`` to ``largest`` such that the larger values weigh less than ``target``.

    A value weighs 1 if ``COUNT``, else as in ``_weights``; summed as ``DTYPE``.
    """
    low, high = sortable(least).to(tl.int64), sortable(largest).to(tl.int64)
    high = tl.maximum(low, high)
    step = 1 + tl.arange(0, PIVOTS)
    while low < high:
        pivots = low + (high - low) * step // (PIVOTS + 1)
        pivot_values = unsortable(pivots.to(tl.int32))[:, None]
        weights = tl.zeros((PIVOTS, BLOCK), DTYPE)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            at = start + tl.arange(0, BLOCK)[None, :]
            values = tl.load(values_ptr + at, at < size, other=float("-inf"))
            if COUNT:
                weights += (values > pivot_values).to(DTYPE)
            else:
                weights += tl.where(values > pivot_values, _weights(values, largest, scale).to(DTYPE), 0)
        enough = tl.sum(weights, 1).to(tl.int64) < target
        low = tl.maximum(low, tl.max(tl.where(enough, low, pivots + 1), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, pivots, high), 0))
    return unsortable(high.to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _search_candidates_kernel(
    slots_ptr,
    records_ptr,
    largest_ptr,
    totals_ptr,
    floors_ptr,
    counts_ptr,
    candidates_ptr,
    cuts_ptr,
    left_ptr,
    RECORD: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MOST: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut as far as the candidates tell; ``left``: the features (TOP_K, TOP_P) that need the whole row."""
    row = tl.program_id(0).to(tl.int64)
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    flags = tl.load(record_ptr + FLAGS)
    cut = tl.full((), LOWEST, tl.float32)
    left = flags & (TOP_K | TOP_P)
    if (flags & CUT) == 0:
        tl.store(cuts_ptr + row, cut)
        tl.store(left_ptr + row, left)
        return
    candidates_ptr += row * CANDIDATES
    scale, largest = scale_of(record_ptr), tl.load(largest_ptr + row)
    if flags & MIN_P:
        cut = tl.maximum(cut, largest + tl.load(record_ptr + MIN_P_OFFSET).to(tl.float32, bitcast=True))
    count, floor = 0, cut
    if left != 0:
        count, floor = tl.load(counts_ptr + row), tl.load(floors_ptr + row)
    top_k = tl.load(record_ptr + TOP_K_COUNT)
    if ((flags & TOP_K) != 0) & (count <= CANDIDATES) & (top_k <= MOST):
        least = _least_kept(candidates_ptr, count, floor, largest, scale, top_k, True, tl.int32, PIVOTS, BLOCK)
        cut, left = tl.maximum(cut, least), left & TOP_P
    if (left == TOP_P) & (count <= CANDIDATES):
        top_p = tl.load(record_ptr + TOP_P_SUM).to(tl.float32, bitcast=True)
        least = tl.maximum(cut, floor)
        weight = _weight_from(candidates_ptr, count, least, largest, scale, tl.int64, BLOCK)
        target = (top_p * weight.to(tl.float32)).to(tl.int64)
        known = cut >= floor
        if (not known) & ((flags & (TOP_K | MIN_P)) == 0):
            # Of the whole row. What is below the candidates is cut for certain if they alone reach the target.
            target = (top_p * tl.load(totals_ptr + row) * UNIT).to(tl.int64)
            known = weight >= target
        if known:
            least = _least_kept(candidates_ptr, count, least, largest, scale, target, False, tl.int64, PIVOTS, BLOCK)
            cut, left = tl.maximum(cut, least), 0
    tl.store(cuts_ptr + row, cut)
    tl.store(left_ptr + row, left)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _search_rows_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    largest_ptr,
    totals_ptr,
    cuts_ptr,
    left_ptr,
    size,
    RECORD: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut by what is left."""
    row = tl.program_id(0).to(tl.int64)
    left = tl.load(left_ptr + row)
    if left == 0:
        return
    record_ptr = records_ptr + tl.load(slots_ptr + row).to(tl.int64) * RECORD
    flags = tl.load(record_ptr + FLAGS)
    logits_ptr += row * stride
    scale, largest, cut = scale_of(record_ptr), tl.load(largest_ptr + row), tl.load(cuts_ptr + row)
    if left & TOP_K:
        top_k = tl.load(record_ptr + TOP_K_COUNT)
        cut = _least_kept(logits_ptr, size, cut, largest, scale, top_k, True, tl.int32, PIVOTS, BLOCK)
    if left & TOP_P:
        total = (tl.load(totals_ptr + row) * UNIT).to(tl.int64)
        if flags & (TOP_K | MIN_P):
            total = _weight_from(logits_ptr, size, cut, largest, scale, tl.float32, BLOCK)
        top_p = tl.load(record_ptr + TOP_P_SUM).to(tl.float32, bitcast=True)
        target = (top_p * total.to(tl.float32)).to(tl.int64)
        cut = _least_kept(logits_ptr, size, cut, largest, scale, target, False, tl.float32, PIVOTS, BLOCK)
    tl.store(cuts_ptr + row, cut)
