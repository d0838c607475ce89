"""The gated activation of the feed-forward block (SwiGLU: Shazeer, 2020)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.programmatic_launch import pdl_options, start_after_previous

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate_up: [tokens, 2 * size], contiguous; the gate is the first half.

    Returns:
        [tokens, size], of the same dtype.
    """
    assert gate_up.is_contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _silu_mul_kernel[(tokens, triton.cdiv(size, BLOCK))](
            gate_up, result, SIZE=size, BLOCK=BLOCK, num_warps=4, **pdl_options(gate_up.device)
        )
    return result


@triton.jit
def silu_mul_of(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(gate_up_ptr, result_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + column, mask, other=0.0).to(tl.float32)
    result = silu_mul_of(gate, up)
    tl.store(result_ptr + row * SIZE + column, result.to(result_ptr.dtype.element_ty), mask)
