"""The token of each row: the largest logit, or the largest sum of scaled logit and noise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.programmatic_launch import pdl_options, start_after_previous
from gpu_worker.kernels.sampling_layout import DRAWN, FLAGS, RECORD
from gpu_worker.kernels.sampling_noise import gumbel, id_of, ranked, row_key, scale_of

BLOCK = 2048
GROUP = 4
"""Neighbours that one thread reads at a time."""
PROGRAMS = 2048
"""Programs that are enough to fill a GPU, where the vocabulary has as many blocks."""
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


class ArgmaxState:
    """What the programs of a row have found so far; each launch leaves it as it was."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.best = torch.full((max_rows,), LOWEST_KEY.value, dtype=torch.int64, device=device)
        self.done = torch.zeros(max_rows, dtype=torch.int32, device=device)


def sample_argmax(
    logits: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    num_tokens: torch.Tensor,
    size: int,
    state: ArgmaxState,
    cuts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``argmax(logits)``, for drawn rows ``argmax(logits / temperature + gumbel)``; the lowest id among equals.

    Several programs share a row: each sends its best to an atomic maximum of (value, id) in one integer, and the last
    one to arrive takes the result. The noise is made in registers (Gumbel-max; counters as in Salmon et al., 2011).

    Args:
        logits: [rows, vocabulary] float32.
        slots: [rows] int32.
        records: [slots, RECORD] int32 of ``sampling_layout``.
        num_tokens: [slots] int32, the position of the drawn token.
        size: only ids below it are looked at.
        cuts: [rows] float32, smaller logits are not drawn; None: all are.

    Returns:
        [rows] int32.
    """
    rows = len(logits)
    assert rows <= len(state.best)
    assert logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        splits = min(triton.cdiv(size, BLOCK), max(1, PROGRAMS // rows))
        _argmax_kernel[(splits, rows)](
            logits,
            logits.stride(0),
            slots,
            records,
            num_tokens,
            tokens if cuts is None else cuts,
            tokens,
            state.best,
            state.done,
            size,
            HAS_CUTS=cuts is not None,
            RECORD=RECORD,
            BLOCK=BLOCK,
            GROUP=GROUP,
            FAST=logits.is_cuda,
            num_warps=8,
            **pdl_options(logits.device),
        )
    return tokens


@triton.jit
def _scores(
    logits_ptr, ids, size, low, high, scale, cut, DRAW: tl.constexpr, HAS_CUTS: tl.constexpr, FAST: tl.constexpr
):
    logits = tl.load(logits_ptr + ids, ids < size, other=float("-inf"))
    if DRAW:
        # Explicitly fused, so that the sum is rounded alike wherever it is compiled.
        noisy = tl.fma(logits, scale, gumbel(low, high, ids, FAST))
        logits = tl.where(logits >= cut, noisy, float("-inf")) if HAS_CUTS else noisy
    return logits


@triton.jit
def _best(
    logits_ptr,
    size,
    first,
    last,
    low,
    high,
    scale,
    cut,
    DRAW: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
):
    """The best key of the blocks ``first`` to ``last``, of which there is at least one.

    Only the maximum of each group is remembered, which takes half the instructions; the best group is computed again.
    """
    groups = tl.arange(0, BLOCK // GROUP)
    places = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    best = tl.zeros((BLOCK // GROUP,), tl.int32) + first
    for block in range(first, last):
        scores = _scores(logits_ptr, block * BLOCK + places, size, low, high, scale, cut, DRAW, HAS_CUTS, FAST)
        largest = tl.max(scores, 1)
        better = largest > value
        value = tl.where(better, largest, value)
        best = tl.where(better, block, best)
    group = id_of(tl.max(ranked(value, best * (BLOCK // GROUP) + groups), 0))
    ids = group * GROUP + tl.arange(0, GROUP)
    return tl.max(ranked(_scores(logits_ptr, ids, size, low, high, scale, cut, DRAW, HAS_CUTS, FAST), ids), 0)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _argmax_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    num_tokens_ptr,
    cuts_ptr,
    tokens_ptr,
    best_ptr,
    done_ptr,
    size,
    HAS_CUTS: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    split, splits, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    record_ptr = records_ptr + slot * RECORD
    blocks = tl.cdiv(size, BLOCK)
    first, last = split * blocks // splits, (split + 1) * blocks // splits
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    if tl.load(record_ptr + FLAGS) & DRAWN:
        low, high = row_key(record_ptr, tl.load(num_tokens_ptr + slot))
        cut = float("-inf")
        if HAS_CUTS:
            cut = tl.load(cuts_ptr + row)
        key = _best(
            row_ptr, size, first, last, low, high, scale_of(record_ptr), cut, True, HAS_CUTS, BLOCK, GROUP, FAST
        )
    else:
        key = _best(row_ptr, size, first, last, 0, 0, 1.0, 0.0, False, False, BLOCK, GROUP, FAST)
    tl.atomic_max(best_ptr + row, key)
    if tl.atomic_add(done_ptr + row, 1) == splits - 1:
        tl.store(tokens_ptr + row, id_of(tl.atomic_xchg(best_ptr + row, LOWEST_KEY)))
        tl.atomic_xchg(done_ptr + row, 0)
