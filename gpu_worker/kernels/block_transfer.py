"""Whole KV blocks between the pool on the GPU and one in host memory, which the GPU reads and writes by itself.

    on the GPU    layer 0: block 0, 1, 2, …    layer 1: block 0, 1, 2, …    …
    on the host   block 0: layer 0, 1, 2, …    block 1: layer 0, 1, 2, …    …

On the host all layers of a block lie side by side, so that the bus carries megabytes in a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 8
"""The bus is two orders of magnitude slower than the GPU's memory: few multiprocessors keep it busy."""
TILE = 8192
"""Words that a program has on the way at a time."""
WORDS_OF_A_WARP = 128
"""16 bytes for each thread."""
MAX_WARPS = 16


def transfer_blocks(
    cache: torch.Tensor, host: torch.Tensor, pairs: torch.Tensor, *, to_host: bool, programs: int = PROGRAMS
) -> None:
    """Copy whole blocks in all layers, bit for bit, in one launch. No block is written twice.

    Args:
        cache: [layers, blocks, ...] of any dtype, contiguous. A block of a layer is a multiple of 4 bytes; if it is one
            of 16, it is copied so many at a time.
        host: [host blocks, layers, ...] of the same dtype, contiguous: page-locked memory, or the cache's device's own.
        pairs: [transfers, 2] int32, contiguous: block of ``cache``, block of ``host``.
        to_host: from ``cache`` to ``host``; else the other way.
        programs: how many share the work, at most. Others that run at the same time have the rest of the GPU.
    """
    assert cache.is_contiguous()
    assert host.is_contiguous()
    assert pairs.is_contiguous()
    layers, blocks = cache.shape[:2]
    assert host.shape[1:] == (layers, *cache.shape[2:])
    assert host.dtype == cache.dtype
    words = cache.view(layers, blocks, -1).view(torch.int32)
    host_words = host.view(len(host), layers, -1).view(torch.int32)
    size = words.shape[2]
    tile = min(TILE, triton.next_power_of_2(size))
    tiles = len(pairs) * layers * triton.cdiv(size, tile)
    if tiles:
        _block_transfer_kernel[(min(programs, tiles),)](
            words, host_words, pairs, tiles, blocks,
            LAYERS=layers, SIZE=size, TILE=tile, TO_HOST=to_host,
            num_warps=min(MAX_WARPS, max(1, tile // WORDS_OF_A_WARP)),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_blocks"], do_not_specialize_on_alignment=["pairs_ptr"])
def _block_transfer_kernel(
    cache_ptr, host_ptr, pairs_ptr, num_tiles, num_blocks,
    LAYERS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, TO_HOST: tl.constexpr,
):  # fmt: skip
    tiles_of_layer: tl.constexpr = (SIZE + TILE - 1) // TILE
    # Programs side by side work at neighbouring tiles of the host's pool.
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        column = tile % tiles_of_layer * TILE + tl.arange(0, TILE)
        chunk = tile // tiles_of_layer
        pair, layer = chunk // LAYERS, (chunk % LAYERS).to(tl.int64)
        block = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
        host_block = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
        cache_ptrs = cache_ptr + (layer * num_blocks + block) * SIZE + column
        host_ptrs = host_ptr + (host_block * LAYERS + layer) * SIZE + column
        mask = column < SIZE
        # Each word is read once: what decoding beside it has in the L2 cache is worth more.
        if TO_HOST:
            tl.store(host_ptrs, tl.load(cache_ptrs, mask, eviction_policy="evict_first"), mask)
        else:
            words = tl.load(host_ptrs, mask, cache_modifier=".cg")
            tl.store(cache_ptrs, words, mask, eviction_policy="evict_first")
