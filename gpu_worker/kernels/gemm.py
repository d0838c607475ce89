"""One product of activations and a weight, by whichever kernel was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import triton
from triton.errors import TritonError as KernelError

from gpu_worker.kernels.activation import silu_mul
from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig
from gpu_worker.kernels.gemv import gemv
from gpu_worker.kernels.split_k import split_k

__all__ = ["KernelError", "compiled_together", "gemm", "library_gemm"]


@contextmanager
def compiled_together(threads: int) -> Iterator[None]:
    """Kernels that are compiled inside are compiled by so many threads at once; all are ready at the end.

    One that cannot be compiled raises its KernelError when it is launched.
    """
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        yield


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    choice: GemmChoice,
    arrivals: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
    compile_only: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` [tokens, out] for ``x`` [tokens, in], ``weight`` [out, in] and ``bias`` [out].

    Args:
        arrivals: of :func:`gpu_worker.kernels.split_k.make_arrivals`.
        out_dtype: dtype of the result; x's where None.
        gated: the first half of the weight's rows, and of the bias, is the gate, and the result is ``silu(gate) * up``
            [tokens, out / 2]. Kernels of ours compute it before they round; after the library's it is another kernel's
            work.
        compile_only: compile the kernel and launch nothing; the result is undefined. Not for the library.
    """
    if choice is None:
        product = library_gemm(x, weight, bias, out_dtype)
        return silu_mul(product) if gated else product
    if isinstance(choice, GemvConfig):
        return gemv(x, weight, bias, choice, out_dtype=out_dtype, gated=gated, compile_only=compile_only)
    return split_k(x, weight, bias, choice, arrivals, out_dtype=out_dtype, gated=gated, compile_only=compile_only)


def library_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same by torch: cuBLAS on a GPU, where a float32 result of half-precision operands is never rounded."""
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if not x.is_cuda:
        return F.linear(x.to(out_dtype), weight.to(out_dtype), None if bias is None else bias.to(out_dtype))
    result = torch.mm(x, weight.t(), out_dtype=out_dtype)
    return result if bias is None else result.add_(bias)
