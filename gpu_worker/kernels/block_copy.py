"""Copies of whole KV blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def block_copy(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks in all layers, bit for bit. No block is both a source and a destination.

    Args:
        cache: [layers, blocks, ...] of any dtype, contiguous; a block is a multiple of 4 bytes.
        pairs: [copies, 2] int32, contiguous: source, destination.
    """
    assert cache.is_contiguous()
    assert pairs.is_contiguous()
    layers, blocks = cache.shape[:2]
    words = cache.view(layers, blocks, -1).view(torch.int32)
    size = words.shape[2]
    if len(pairs):
        _block_copy_kernel[(len(pairs), layers, triton.cdiv(size, BLOCK))](
            words, pairs, words.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=8
        )


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])
def _block_copy_kernel(words_ptr, pairs_ptr, layer_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    destination = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    layer_ptr = words_ptr + layer * layer_stride
    words = tl.load(layer_ptr + source * SIZE + column, mask)
    tl.store(layer_ptr + destination * SIZE + column, words, mask)
