"""What requests forbid and prefer: allowed ids, bad words, min_tokens, logit bias, penalties, in this order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.penalties import penalise
from gpu_worker.kernels.sampling_layout import (
    ALLOWED,
    ALLOWED_COUNT,
    ANY,
    BAD_WORDS,
    BIASES_COUNT,
    CHANGED,
    ENDS_COUNT,
    FLAGS,
    LISTS,
    LOGIT_BIAS,
    MIN_TOKENS,
    MIN_TOKENS_COUNT,
    PENALTIES,
    RECORD,
    WORDS_COUNT,
    WORDS_LONGEST,
)

BLOCK = 4096
"""Logits that are looked at together."""
ENTRIES = 512
"""Entries of a list, and known tokens, that are looked at together."""


def constrain(
    logits: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    arena_address: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    size: int,
) -> None:
    """Change the logits of rows that have such a feature as the components of ``gpu_worker.sampling`` do.

    One program for each row: all but the allowed ids touches only named tokens.

    Args:
        logits: [rows, vocabulary] float32, in place.
        slots: [rows] int32.
        records: [slots, RECORD] int32 of ``sampling_layout``.
        arena_address: [1] int64.
        token_ids: [slots, max_model_len] int32.
        num_tokens: [slots] int32.
        prompt_len: [slots] int32.
        size: only ids below it can be sampled.
    """
    rows = len(logits)
    if not rows:
        return
    known = torch.empty((rows, token_ids.shape[1]), dtype=torch.float32, device=logits.device)
    _constrain_kernel[(rows,)](
        logits,
        logits.stride(0),
        slots,
        records,
        arena_address,
        token_ids,
        token_ids.stride(0),
        num_tokens,
        prompt_len,
        known,
        known.stride(0),
        size,
        RECORD=RECORD,
        BLOCK=BLOCK,
        ENTRIES=ENTRIES,
        num_warps=8,
    )


@triton.jit
def _allow(logits_ptr, bits_ptr, size, BLOCK: tl.constexpr):
    """``-inf`` for ids whose bit is not set."""
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        mask = ids < size
        word = tl.load(bits_ptr + ids // 32, mask, other=-1)
        tl.store(logits_ptr + ids, float("-inf"), mask & (((word >> (ids % 32)) & 1) == 0))
    tl.debug_barrier()


@triton.jit
def _hide(logits_ptr, saved_ptr, ids_ptr, count, size, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """``-inf`` for the ids whose ``saved`` is not NaN: their logits. These are put back if no id is left."""
    tl.debug_barrier()
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        saved = tl.load(saved_ptr + entry, entry < count, other=float("nan"))
        ids = tl.load(ids_ptr + entry, entry < count, other=0)
        tl.store(logits_ptr + ids, float("-inf"), saved == saved)
    tl.debug_barrier()
    start = 0
    left = float("-inf")
    while (start < size) & (left == float("-inf")):
        ids = start + tl.arange(0, BLOCK)
        left = tl.max(tl.load(logits_ptr + ids, ids < size, other=float("-inf"), cache_modifier=".cg"), 0)
        start += BLOCK
    if left == float("-inf"):
        tl.debug_barrier()
        for start in range(0, count, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            saved = tl.load(saved_ptr + entry, entry < count, other=float("nan"))
            ids = tl.load(ids_ptr + entry, entry < count, other=0)
            tl.store(logits_ptr + ids, saved, saved == saved)
    tl.debug_barrier()


@triton.jit
def _save_completed(
    logits_ptr, saved_ptr, prefixes_ptr, last_ptr, words, longest, known_ptr, position, ENTRIES: tl.constexpr
):
    """``saved`` [words]: the logits of the last ids of words whose other ids end the known tokens, NaN for others."""
    for start in range(0, words, ENTRIES):
        word = start + tl.arange(0, ENTRIES)
        mask = word < words
        completed = mask
        for column in range(longest):
            place = position - longest + column
            wanted = tl.load(prefixes_ptr + word * longest + column, mask, other=ANY)
            seen = tl.load(known_ptr + tl.maximum(place, 0))
            completed = completed & ((wanted == ANY) | ((place >= 0) & (wanted == seen)))
        ids = tl.load(last_ptr + word, mask, other=0)
        tl.store(saved_ptr + word, tl.load(logits_ptr + ids, completed, other=float("nan"), cache_modifier=".cg"), mask)


@triton.jit
def _save(logits_ptr, saved_ptr, ids_ptr, count, ENTRIES: tl.constexpr):
    """``saved`` [count]: the logits of some ids."""
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        mask = entry < count
        ids = tl.load(ids_ptr + entry, mask, other=0)
        tl.store(saved_ptr + entry, tl.load(logits_ptr + ids, mask, other=0.0, cache_modifier=".cg"), mask)


@triton.jit
def _bias(logits_ptr, ids_ptr, biases_ptr, count, ENTRIES: tl.constexpr):
    """Add to the logits of some distinct ids."""
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        mask = entry < count
        ids = tl.load(ids_ptr + entry, mask, other=0)
        bias = tl.load(biases_ptr + entry, mask, other=0).to(tl.float32, bitcast=True)
        tl.store(logits_ptr + ids, tl.load(logits_ptr + ids, mask, other=0.0, cache_modifier=".cg") + bias, mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _constrain_kernel(
    logits_ptr,
    stride,
    slots_ptr,
    records_ptr,
    arena_address_ptr,
    token_ids_ptr,
    tokens_stride,
    num_tokens_ptr,
    prompt_len_ptr,
    known_ptr,
    known_stride,
    size,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    record_ptr = records_ptr + slot * RECORD
    flags = tl.load(record_ptr + FLAGS)
    if (flags & CHANGED) == 0:
        return
    logits_ptr += row * stride
    ids_ptr = token_ids_ptr + slot * tokens_stride
    position, prompt = tl.load(num_tokens_ptr + slot), tl.load(prompt_len_ptr + slot)
    words, longest = tl.load(record_ptr + WORDS_COUNT), tl.load(record_ptr + WORDS_LONGEST)
    ends, biases = tl.load(record_ptr + ENDS_COUNT), tl.load(record_ptr + BIASES_COUNT)
    allowed_ptr = tl.load(arena_address_ptr).to(tl.pointer_type(tl.int32)) + tl.load(record_ptr + LISTS).to(tl.int64)
    prefixes_ptr = allowed_ptr + tl.load(record_ptr + ALLOWED_COUNT)
    last_ptr = prefixes_ptr + words * longest
    ends_ptr = last_ptr + words
    bias_ids_ptr = ends_ptr + ends
    saved_ptr = (bias_ids_ptr + 2 * biases).to(tl.pointer_type(tl.float32), bitcast=True)
    if flags & ALLOWED:
        _allow(logits_ptr, allowed_ptr, size, BLOCK)
    if flags & BAD_WORDS:
        _save_completed(logits_ptr, saved_ptr, prefixes_ptr, last_ptr, words, longest, ids_ptr, position, ENTRIES)
        _hide(logits_ptr, saved_ptr, last_ptr, words, size, BLOCK, ENTRIES)
    if ((flags & MIN_TOKENS) != 0) & (position - prompt < tl.load(record_ptr + MIN_TOKENS_COUNT)):
        _save(logits_ptr, saved_ptr, ends_ptr, ends, ENTRIES)
        _hide(logits_ptr, saved_ptr, ends_ptr, ends, size, BLOCK, ENTRIES)
    if flags & LOGIT_BIAS:
        _bias(logits_ptr, bias_ids_ptr, bias_ids_ptr + biases, biases, ENTRIES)
    if flags & PENALTIES:
        penalise(logits_ptr, record_ptr, flags, ids_ptr, position, prompt, known_ptr + row * known_stride, ENTRIES)
