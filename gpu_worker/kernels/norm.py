"""Root mean square normalisation (Zhang and Sennrich, 2019) fused with the addition to the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.programmatic_launch import let_next_start, pdl_options, wait_for_previous

MAX_SIZE = 16384
"""Elements of a row at most: a row is held in the registers of one program."""
TILE = 1024
"""Elements of a program at least; narrower rows share one."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: [rows, size] float32, contiguous.
        weight: [size] float32.
        dtype: of the result.

    Returns:
        [rows, size].
    """
    return _launch(x, None, weight, eps, dtype)


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """``hidden += delta``, and the norm of the sum as in ``rms_norm``.

    Args:
        hidden: [rows, size] float32, contiguous; updated in place.
        delta: [rows, size] of any float dtype, contiguous.
        weight: [size] float32.
        dtype: of the result.

    Returns:
        [rows, size].
    """
    return _launch(hidden, delta, weight, eps, dtype)


def _launch(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    rows, size = hidden.shape
    assert size <= MAX_SIZE
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    normed = torch.empty((rows, size), dtype=dtype, device=hidden.device)
    if not rows:
        return normed
    block = triton.next_power_of_2(size)
    rows_per_program = max(1, TILE // block)
    _add_rms_norm_kernel[(triton.cdiv(rows, rows_per_program),)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        eps,
        rows,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_per_program,
        HAS_DELTA=delta is not None,
        num_warps=min(16, max(4, block // 512)),
        **pdl_options(hidden.device),
    )
    return normed


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    normed_ptr,
    eps,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < SIZE
    mask = (row < rows) & inside
    place = row * SIZE + column
    weight = tl.load(weight_ptr + column, inside, other=0.0, eviction_policy="evict_last")
    wait_for_previous(PDL)
    x = tl.load(hidden_ptr + place, mask, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta_ptr + place, mask, other=0.0).to(tl.float32)
        tl.store(hidden_ptr + place, x, mask)
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / SIZE + eps)
    tl.store(normed_ptr + place, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask)
