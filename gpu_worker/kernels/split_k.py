"""Products of few tokens on tensor cores: weight rows take the long side of the instruction, tokens the short one.

A tile is ``block_n`` weight rows by ``block_m`` tokens. Where there are too few tiles to keep the memory busy,
``parts`` programs share the inner dimension of each; every one writes its float32 sums, and the last to arrive adds
them up in the order of the parts, so that the result does not depend on who was last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.activation import silu_mul_of
from gpu_worker.kernels.gemm_config import SplitKConfig
from gpu_worker.kernels.programmatic_launch import let_next_start, pdl_options, prefetch_rows, wait_for_previous

MAX_SPLIT_TILES = 256
"""With more tiles than this the parts of a tile are computed one after another by one program: the GPU is full without
dividing them, and the sums of many tokens would need much memory. The bits are the same either way."""


@triton.jit
def _dot_range(
    x,
    weight,
    tokens,
    row_start,
    num_tokens,
    depth,
    x_stride,
    first,
    last,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] float32: the products over the blocks ``first`` to ``last`` of the inner dimension."""
    offsets = tl.arange(0, BLOCK_K)
    weight_pointers = weight + row_start[:, None] + offsets[None, :]
    token_pointers = x + tokens.to(tl.int64)[None, :] * x_stride + offsets[:, None]
    is_token = (tokens < num_tokens)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first, last):
        start = block * BLOCK_K
        if EVEN_K:
            w = tl.load(weight_pointers + start, eviction_policy="evict_first")
            t = tl.load(token_pointers + start, mask=is_token, other=0.0)
        else:
            in_depth = start + offsets < depth
            w = tl.load(weight_pointers + start, mask=in_depth[None, :], other=0.0, eviction_policy="evict_first")
            t = tl.load(token_pointers + start, mask=is_token & in_depth[:, None], other=0.0)
        sums = tl.dot(w, t, sums, input_precision="ieee")
    return sums


@triton.jit
def _weight_rows(num_outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The rows of this program's tile; eight of the gate and the eight of up that belong to them in turns, if gated.

    An accumulator of the matrix instruction holds both then in registers of the same thread. Rows past the end are the
    last one again, which spares the loads a mask.
    """
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        return tl.minimum(row // 16 * 8 + row % 8, num_outputs - 1) + row // 8 % 2 * num_outputs
    else:
        return tl.minimum(row, num_outputs - 1)


@triton.jit
def _store_tile(
    out,
    bias,
    sums,
    tokens,
    rows,
    num_tokens,
    num_outputs,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if HAS_BIAS:
        sums += tl.load(bias + rows).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(tl.reshape(sums, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
        gate, up = tl.split(halves)
        sums = tl.reshape(silu_mul_of(gate, up), [OUTPUTS, BLOCK_M])
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(
        out + tokens.to(tl.int64)[None, :] * num_outputs + output[:, None],
        sums.to(out.dtype.element_ty),
        mask=(output < num_outputs)[:, None] & (tokens < num_tokens)[None, :],
    )


@triton.jit
def _add_parts(
    out,
    bias,
    partials,
    arrivals,
    sums,
    tokens,
    rows,
    num_tokens,
    num_outputs,
    parts,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Writes this program's part of its tile, and the tile if all other parts are there."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    cells = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tile_partials = partials + tile.to(tl.int64) * (BLOCK_N * BLOCK_M) + cells
    part_stride = tl.num_programs(0) * tl.num_programs(1) * (BLOCK_N * BLOCK_M)
    tl.store(tile_partials + tl.program_id(2).to(tl.int64) * part_stride, sums)
    # All threads' sums must be written before this program counts as arrived.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == parts - 1:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for _ in range(parts):
            # From L2: this multiprocessor's L1 may hold what was there before.
            total += tl.load(tile_partials, cache_modifier=".cg")
            tile_partials += part_stride
        _store_tile(out, bias, total, tokens, rows, num_tokens, num_outputs, BLOCK_N, BLOCK_M, HAS_BIAS, GATED)
        tl.store(arrivals + tile, 0)


@triton.jit(do_not_specialize=["num_tokens", "part_blocks", "parts"])
def _split_k_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
    num_tokens,
    num_outputs,
    depth,
    x_stride,
    part_blocks,
    parts,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCHED: tl.constexpr,
    MODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    # Tokens are the fast axis: programs that run together share the same weights.
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = _weight_rows(num_outputs, BLOCK_N, GATED)
    row_start = rows.to(tl.int64) * depth
    num_blocks = tl.cdiv(depth, BLOCK_K)
    first = tl.program_id(2) * part_blocks
    last = tl.minimum(first + part_blocks, num_blocks)
    prefetch_rows(weight, row_start, first * BLOCK_K, tl.minimum(last * BLOCK_K, depth), PREFETCHED, PDL)
    wait_for_previous(PDL)
    if MODE == "serial":
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for begin in range(0, num_blocks, part_blocks):
            end = tl.minimum(begin + part_blocks, num_blocks)
            total += _dot_range(
                x, weight, tokens, row_start, num_tokens, depth, x_stride, begin, end,
                BLOCK_N, BLOCK_M, BLOCK_K, EVEN_K,
            )  # fmt: skip
        _store_tile(out, bias, total, tokens, rows, num_tokens, num_outputs, BLOCK_N, BLOCK_M, HAS_BIAS, GATED)
    else:
        sums = _dot_range(
            x, weight, tokens, row_start, num_tokens, depth, x_stride, first, last, BLOCK_N, BLOCK_M, BLOCK_K, EVEN_K
        )
        if MODE == "whole":
            _store_tile(out, bias, sums, tokens, rows, num_tokens, num_outputs, BLOCK_N, BLOCK_M, HAS_BIAS, GATED)
        else:
            _add_parts(
                out, bias, partials, arrivals, sums, tokens, rows, num_tokens, num_outputs, parts,
                BLOCK_N, BLOCK_M, HAS_BIAS, GATED,
            )  # fmt: skip


def make_arrivals(device: torch.device) -> torch.Tensor:
    """int32 [MAX_SPLIT_TILES] zeros, which :func:`split_k` counts in and leaves at zero.

    One is for one stream: two products that run at the same time must not share it.
    """
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def split_k(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: SplitKConfig,
    arrivals: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
    compile_only: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` for any number of tokens, summed in float32.

    The order of a token's sums depends on the config and the shape of the weight alone: with one config a token's
    result is the same bits whatever the other tokens are, and however many.

    Args:
        x: [tokens, in], rows contiguous; one token or more.
        weight: [out, in], contiguous, bfloat16, float16 or float32.
        bias: [out].
        arrivals: of :func:`make_arrivals`.
        out_dtype: dtype of the result; x's where None.
        gated: the first half of the weight's rows, and of the bias, is the gate; the result is ``silu(gate) * up``,
            computed in float32 from sums that are not rounded before.
        compile_only: compile the kernel and launch nothing; the result is undefined.

    Returns:
        [tokens, out], or [tokens, out / 2] where gated, from ``torch.empty``.
    """
    num_tokens, depth = x.shape
    num_outputs = len(weight) // 2 if gated else len(weight)
    grid = (triton.cdiv(num_tokens, config.block_m), triton.cdiv(len(weight), config.block_n))
    num_blocks = triton.cdiv(depth, config.block_k)
    part_blocks = triton.cdiv(num_blocks, config.parts)
    parts = triton.cdiv(num_blocks, part_blocks)
    tiles = grid[0] * grid[1]
    mode = "whole" if parts == 1 else "split" if tiles <= MAX_SPLIT_TILES else "serial"
    out = torch.empty(num_tokens, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    partials = arrivals
    if mode == "split":
        partials = torch.empty(parts * tiles * config.block_n * config.block_m, dtype=torch.float32, device=x.device)
    _split_k_kernel.run(
        x,
        weight,
        weight if bias is None else bias,
        out,
        partials,
        arrivals,
        num_tokens,
        num_outputs,
        depth,
        x.stride(0),
        part_blocks,
        parts,
        BLOCK_N=config.block_n,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        PREFETCHED=config.block_k << (config.stages.bit_length() - 1),
        MODE=mode,
        EVEN_K=depth % config.block_k == 0,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=config.warps,
        num_stages=config.stages,
        grid=(*grid, parts if mode == "split" else 1),
        warmup=compile_only,
        **pdl_options(x.device),
    )
    return out
