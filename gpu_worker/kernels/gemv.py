"""Matrix-vector products for one to four tokens: each weight is read once, in wide loads, and summed in float32.

The first block of weights is asked for before the kernel that makes the activations has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.activation import silu_mul_of
from gpu_worker.kernels.gemm_config import GemvConfig
from gpu_worker.kernels.programmatic_launch import let_next_start, pdl_options, prefetch_rows, wait_for_previous

MAX_TOKENS = 4
PREFETCHED_ROWS = 2
"""Blocks of weights that a program brings closer beside the first ones, all rows together: those with few rows would
otherwise have asked for little when their activations are there."""


@triton.jit
def _load_weights(pointers, k, depth, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=k[None, :] < depth, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_token(x, k, depth, EVEN_K: tl.constexpr):
    if EVEN_K:
        values = tl.load(x + k, eviction_policy="evict_last")
    else:
        values = tl.load(x + k, mask=k < depth, other=0.0, eviction_policy="evict_last")
    return values.to(tl.float32)[None, :]


@triton.jit
def _store_token(out, sums, offset, first, num_outputs, ROWS: tl.constexpr, GATED: tl.constexpr):
    total = tl.sum(sums, 1) + offset
    if GATED:
        gate, up = tl.split(tl.reshape(total, [ROWS // 2, 2]))
        outputs = first // 2 + tl.arange(0, ROWS // 2)
        tl.store(out + outputs, silu_mul_of(gate, up).to(out.dtype.element_ty), mask=outputs < num_outputs)
    else:
        outputs = first + tl.arange(0, ROWS)
        tl.store(out + outputs, total.to(out.dtype.element_ty), mask=outputs < num_outputs)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    out,
    num_outputs,
    depth,
    x_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCHED: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    # Rows past the end load the last one again: a mask would cost every load, this costs one program.
    if GATED:
        rows = tl.minimum(rows // 2, num_outputs - 1) + rows % 2 * num_outputs
    else:
        rows = tl.minimum(rows, num_outputs - 1)
    k = tl.arange(0, BLOCK_K)
    row_start = rows.to(tl.int64) * depth
    pointers = weight + row_start[:, None] + k[None, :]
    offset = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + rows).to(tl.float32)
    weights = _load_weights(pointers, k, depth, EVEN_K)
    if PREFETCHED:
        prefetch_rows(weight, row_start, BLOCK_K, depth, PREFETCHED, PDL)
    wait_for_previous(PDL)
    w = weights.to(tl.float32)
    sum_0 = w * _load_token(x, k, depth, EVEN_K)
    if TOKENS > 1:
        sum_1 = w * _load_token(x + x_stride, k, depth, EVEN_K)
    if TOKENS > 2:
        sum_2 = w * _load_token(x + 2 * x_stride, k, depth, EVEN_K)
    if TOKENS > 3:
        sum_3 = w * _load_token(x + 3 * x_stride, k, depth, EVEN_K)
    for start in range(BLOCK_K, depth, BLOCK_K):
        w = _load_weights(pointers + start, start + k, depth, EVEN_K).to(tl.float32)
        sum_0 += w * _load_token(x, start + k, depth, EVEN_K)
        if TOKENS > 1:
            sum_1 += w * _load_token(x + x_stride, start + k, depth, EVEN_K)
        if TOKENS > 2:
            sum_2 += w * _load_token(x + 2 * x_stride, start + k, depth, EVEN_K)
        if TOKENS > 3:
            sum_3 += w * _load_token(x + 3 * x_stride, start + k, depth, EVEN_K)
    _store_token(out, sum_0, offset, first, num_outputs, ROWS, GATED)
    if TOKENS > 1:
        _store_token(out + num_outputs, sum_1, offset, first, num_outputs, ROWS, GATED)
    if TOKENS > 2:
        _store_token(out + 2 * num_outputs, sum_2, offset, first, num_outputs, ROWS, GATED)
    if TOKENS > 3:
        _store_token(out + 3 * num_outputs, sum_3, offset, first, num_outputs, ROWS, GATED)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: GemvConfig,
    *,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
    compile_only: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` for 1 to 4 tokens, summed in float32.

    The order of the sums depends on the config alone.

    Args:
        x: [tokens, in], rows contiguous.
        weight: [out, in], contiguous, bfloat16, float16 or float32.
        bias: [out].
        out_dtype: dtype of the result; x's where None.
        gated: the first half of the weight's rows, and of the bias, is the gate; the result is ``silu(gate) * up``,
            computed in float32 from sums that are not rounded before.
        compile_only: compile the kernel and launch nothing; the result is undefined.

    Returns:
        [tokens, out], or [tokens, out / 2] where gated, from ``torch.empty``.
    """
    tokens, depth = x.shape
    num_outputs = len(weight) // 2 if gated else len(weight)
    rows = max(2, config.rows) if gated else config.rows
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"gemv takes 1 to {MAX_TOKENS} tokens, got {tokens}")
    out = torch.empty(tokens, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    _gemv_kernel.run(
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_outputs,
        depth,
        x.stride(0),
        TOKENS=tokens,
        ROWS=rows,
        BLOCK_K=config.block_k,
        PREFETCHED=PREFETCHED_ROWS // rows * config.block_k if depth > config.block_k else 0,
        EVEN_K=depth % config.block_k == 0,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=config.warps,
        grid=(triton.cdiv(len(weight), rows),),
        warmup=compile_only,
        **pdl_options(x.device, weight=weight),
    )
    return out
