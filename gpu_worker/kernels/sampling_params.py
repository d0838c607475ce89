"""New slots' records and lists to their places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.sampling_layout import RECORD

BLOCK = 1024


def scatter_params(
    places: torch.Tensor, staged: torch.Tensor, longest: int, records: torch.Tensor, arena: torch.Tensor
) -> None:
    """Copy each request's record to its slot and its lists to the arena.

    Args:
        places: [requests, 4] int32, contiguous: slot, offset of its staged words (the record, then the lists), length
            of the lists, where they go in the arena.
        staged: [words] int32.
        longest: length of the longest lists.
        records: [slots, RECORD] int32.
        arena: [words] int32.
    """
    _scatter_kernel[(len(places), 1 + triton.cdiv(longest, BLOCK))](
        places, staged, records, arena, RECORD=RECORD, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize_on_alignment=["places_ptr", "staged_ptr"])
def _scatter_kernel(places_ptr, staged_ptr, records_ptr, arena_ptr, RECORD: tl.constexpr, BLOCK: tl.constexpr):
    place_ptr, chunk = places_ptr + 4 * tl.program_id(0), tl.program_id(1)
    staged_ptr += tl.load(place_ptr + 1)
    if chunk == 0:
        word = tl.arange(0, RECORD)
        slot = tl.load(place_ptr).to(tl.int64)
        tl.store(records_ptr + slot * RECORD + word, tl.load(staged_ptr + word))
    else:
        entry = (chunk - 1) * BLOCK + tl.arange(0, BLOCK)
        mask = entry < tl.load(place_ptr + 2)
        to = arena_ptr + tl.load(place_ptr + 3).to(tl.int64)
        tl.store(to + entry, tl.load(staged_ptr + RECORD + entry, mask), mask)
