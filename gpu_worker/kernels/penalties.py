"""Repetition, frequency and presence penalties, from the known tokens of a slot."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.sampling_layout import FREQUENCY_COST, PRESENCE_COST, REPETITION, REPETITION_FACTOR


@triton.jit
def penalise(logits_ptr, record_ptr, flags, ids_ptr, length, prompt, saved_ptr, BLOCK: tl.constexpr):
    """Change each distinct known token's logit once.

    ``logit / factor`` or ``logit * factor`` by its sign for tokens of the prompt and the output (Keskar et al., 2019,
    with transformers' signs), then ``- frequency * count`` and ``- presence`` for tokens of the output (OpenAI).

    Neither the vocabulary is visited nor a counter of its size kept: the places of the logits themselves count, as
    integers, while their values are ``saved``. First each occurrence writes its position; the one that is found
    there is the token's owner. Then the place counts the token in the output, and at last the owner writes the new
    value.

    Args:
        logits_ptr: [vocabulary] float32 of the row.
        ids_ptr: [length] int32, the known tokens.
        prompt: how many of them are the prompt.
        saved_ptr: [length] float32, not initialised.
    """
    places_ptr = logits_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    first = 0
    if (flags & REPETITION) == 0:
        first = tl.maximum(prompt, 0)
    tl.debug_barrier()
    for start in range(first, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, at < length, other=0)
        tl.store(saved_ptr + at, tl.load(logits_ptr + ids, at < length, other=0.0, cache_modifier=".cg"), at < length)
    tl.debug_barrier()
    for start in range(first, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, at < length, other=0)
        tl.store(places_ptr + ids, at, at < length)
    tl.debug_barrier()
    for start in range(first, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, at < length, other=0)
        owner = tl.load(places_ptr + ids, at < length, other=0, cache_modifier=".cg")
        tl.store(saved_ptr + at, float("nan"), (at < length) & (owner != at))
    tl.debug_barrier()
    for start in range(first, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, at < length, other=0)
        tl.store(places_ptr + ids, 0, at < length)
    tl.debug_barrier()
    for start in range(tl.maximum(prompt, 0), length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, at < length, other=0)
        tl.atomic_add(places_ptr + ids, 1, at < length, sem="relaxed")
    tl.debug_barrier()
    factor = tl.load(record_ptr + REPETITION_FACTOR).to(tl.float32, bitcast=True)
    frequency = tl.load(record_ptr + FREQUENCY_COST).to(tl.float32, bitcast=True)
    presence = tl.load(record_ptr + PRESENCE_COST).to(tl.float32, bitcast=True)
    for start in range(first, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, at < length, other=0)
        value = tl.load(saved_ptr + at, at < length, other=float("nan"))
        count = tl.load(places_ptr + ids, at < length, other=0, cache_modifier=".cg").to(tl.float32)
        owner = value == value
        if flags & REPETITION:
            value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        value = tl.where(count > 0, value - frequency * count - presence, value)
        tl.store(logits_ptr + ids, value, owner)
    tl.debug_barrier()
