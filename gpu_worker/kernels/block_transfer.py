"""Whole KV blocks between the pool on the GPU and a piece of its memory where they lie as in host memory.

    pool     layer 0: block 0, 1, 2, …    layer 1: block 0, 1, 2, …    …
    piece    block a: layer 0, 1, 2, …    block b: layer 0, 1, 2, …    …

A copy engine then carries runs of blocks over the bus, and no multiprocessor waits for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 256
"""At most. They are small and over in tens of microseconds; more would be no faster, and in the way of those that run
beside them."""
TILE = 4096
"""Words that a program has on the way at a time."""
WORDS_OF_A_WARP = 128
"""16 bytes for each thread."""
MAX_WARPS = 4


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, piece: torch.Tensor) -> None:
    """Copy whole blocks in all layers out of the cache, bit for bit, in one launch.

    Args:
        cache: [layers, blocks, ...] of any dtype, contiguous. A block of a layer is a multiple of 4 bytes; if it is one
            of 16, it is copied so many at a time.
        blocks: [n] int32, contiguous: which.
        piece: [n, layers, words of a block of a layer] int32, contiguous, on the cache's device, of less than 2 ** 31
            words: ``blocks[i]`` comes to be ``piece[i]``.
    """
    _launch(cache, blocks, piece, gathers=True)


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, piece: torch.Tensor) -> None:
    """The other way: ``piece[i]`` comes to be ``blocks[i]``, no two of which are equal."""
    _launch(cache, blocks, piece, gathers=False)


def words_of(pool: torch.Tensor) -> torch.Tensor:
    """[a, b, words] int32 of whole blocks [a, b, ...] of any dtype, the same memory."""
    return pool.view(*pool.shape[:2], -1).view(torch.int32)


def _launch(cache: torch.Tensor, blocks: torch.Tensor, piece: torch.Tensor, *, gathers: bool) -> None:
    assert cache.is_contiguous()
    assert blocks.is_contiguous()
    assert piece.is_contiguous()
    words = words_of(cache)
    layers, num_blocks, size = words.shape
    assert piece.shape == (len(blocks), layers, size)
    assert piece.numel() < 2**31
    tile = min(TILE, triton.next_power_of_2(size))
    tiles = len(blocks) * layers * triton.cdiv(size, tile)
    if tiles:
        _block_transfer_kernel[(min(PROGRAMS, tiles),)](
            words, piece, blocks, tiles, num_blocks,
            LAYERS=layers, SIZE=size, TILE=tile, GATHERS=gathers,
            num_warps=min(MAX_WARPS, max(1, tile // WORDS_OF_A_WARP)),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_blocks"], do_not_specialize_on_alignment=["blocks_ptr"])
def _block_transfer_kernel(
    cache_ptr, piece_ptr, blocks_ptr, num_tiles, num_blocks,
    LAYERS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    tiles_of_layer: tl.constexpr = (SIZE + TILE - 1) // TILE
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        column = tile % tiles_of_layer * TILE + tl.arange(0, TILE)
        place = tile // tiles_of_layer
        layer = (place % LAYERS).to(tl.int64)
        block = tl.load(blocks_ptr + place // LAYERS).to(tl.int64)
        cache_ptrs = cache_ptr + (layer * num_blocks + block) * SIZE + column
        piece_ptrs = piece_ptr + place * SIZE + column
        mask = column < SIZE
        # Each word is used once: what decoding beside it has in the L2 cache is worth more.
        if GATHERS:
            words = tl.load(cache_ptrs, mask, eviction_policy="evict_first")
            tl.store(piece_ptrs, words, mask, eviction_policy="evict_first")
        else:
            words = tl.load(piece_ptrs, mask, eviction_policy="evict_first")
            tl.store(cache_ptrs, words, mask, eviction_policy="evict_first")
