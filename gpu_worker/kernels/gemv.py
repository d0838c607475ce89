"""Matrix-vector products for one to four tokens: each weight is read once, in wide loads, and summed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.gemm_config import GemvConfig

MAX_TOKENS = 4


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    depth,
    x_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end load the last one again: a mask would cost every load, this costs one program.
    row_start = tl.minimum(rows, num_rows - 1).to(tl.int64) * depth
    offsets = tl.arange(0, BLOCK_K)
    sum_0 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    sum_1 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    sum_2 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    sum_3 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + offsets
        pointers = weight + row_start[:, None] + k[None, :]
        if EVEN_K:
            w = tl.load(pointers, eviction_policy="evict_first").to(tl.float32)
        else:
            w = tl.load(pointers, mask=k[None, :] < depth, other=0.0, eviction_policy="evict_first").to(tl.float32)
        sum_0 += w * _load_token(x, k, depth, EVEN_K)[None, :]
        if TOKENS > 1:
            sum_1 += w * _load_token(x + x_stride, k, depth, EVEN_K)[None, :]
        if TOKENS > 2:
            sum_2 += w * _load_token(x + 2 * x_stride, k, depth, EVEN_K)[None, :]
        if TOKENS > 3:
            sum_3 += w * _load_token(x + 3 * x_stride, k, depth, EVEN_K)[None, :]
    in_range = rows < num_rows
    offset = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + rows, mask=in_range, other=0.0).to(tl.float32)
    out_type = out.dtype.element_ty
    tl.store(out + rows, (tl.sum(sum_0, 1) + offset).to(out_type), mask=in_range)
    if TOKENS > 1:
        tl.store(out + num_rows + rows, (tl.sum(sum_1, 1) + offset).to(out_type), mask=in_range)
    if TOKENS > 2:
        tl.store(out + 2 * num_rows + rows, (tl.sum(sum_2, 1) + offset).to(out_type), mask=in_range)
    if TOKENS > 3:
        tl.store(out + 3 * num_rows + rows, (tl.sum(sum_3, 1) + offset).to(out_type), mask=in_range)


@triton.jit
def _load_token(x, k, depth, EVEN_K: tl.constexpr):
    if EVEN_K:
        values = tl.load(x + k, eviction_policy="evict_last")
    else:
        values = tl.load(x + k, mask=k < depth, other=0.0, eviction_policy="evict_last")
    return values.to(tl.float32)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: GemvConfig,
    *,
    out_dtype: torch.dtype | None = None,
    compile_only: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` for 1 to 4 tokens, summed in float32.

    The order of the sums depends on the config alone.

    Args:
        x: [tokens, in], rows contiguous.
        weight: [out, in], contiguous, bfloat16, float16 or float32.
        bias: [out].
        out_dtype: dtype of the result; x's where None.
        compile_only: compile the kernel and launch nothing; the result is undefined.

    Returns:
        [tokens, out], from ``torch.empty``.
    """
    tokens, depth = x.shape
    num_rows = len(weight)
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"gemv takes 1 to {MAX_TOKENS} tokens, got {tokens}")
    out = torch.empty(tokens, num_rows, dtype=out_dtype or x.dtype, device=x.device)
    _gemv_kernel.run(
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        depth,
        x.stride(0),
        TOKENS=tokens,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        EVEN_K=depth % config.block_k == 0,
        HAS_BIAS=bias is not None,
        num_warps=config.warps,
        grid=(triton.cdiv(num_rows, config.rows),),
        warmup=compile_only,
    )
    return out
