"""Programmatic dependent launch: the programs of a kernel take their places while the kernel before it still runs.

Between two kernels of a stream, or of a captured graph, a GPU is idle for about a microsecond: the first one drains,
then the second one is launched, reads its arguments and asks for its first data. With this launch attribute (compute
capability 9.0 and up; "Programmatic Dependent Launch and Synchronization" in the CUDA programming guide) a kernel may
begin as soon as each program of the one before it has called ``let_next_start`` or has ended. What it does before
``wait_for_previous`` overlaps with that kernel, as far as there is room beside it.

**What a kernel with the attribute must do.** Every program calls ``wait_for_previous`` on each of its paths, before it
writes anything and before it reads anything but constants: weights, which no kernel writes once the host has waited for
them to be loaded.

**Why that is right.** ``wait_for_previous`` returns when the kernel before has ended and its writes are visible. That
kernel cannot have ended before its own wait returned, thus neither before the end of the one before it, and so on; a
kernel without the attribute ends this chain, as it starts only when all before it have ended. So after its wait each
kernel runs as if the attribute did not exist. In particular memory may be used again: an allocator gives memory that
one kernel reads to the result of a later one, in the order of the stream (within a graph's pool, too), and the later
one writes only when the reader has ended. Events, copies and kernels without the attribute wait for the end of the
kernel before them, as ever.

**When to call ``let_next_start``.** First of all, in every kernel here. It takes effect when the last program of the
grid has called it: all of them have a place on a multiprocessor by then, and none that waits for a place can be kept
from it by the next kernel, however large the grids are. The same holds for the kernel after the next. Programs that
wait are asleep, and what they read ahead of the wait (the weights of products) must be read in any case.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)
LARGE_BYTES = 16 << 20
"""Programs of the next kernel take what places become free, some multiprocessors' all and others' none; programs that
begin together are spread evenly. A long read of weights loses more by the former than a launch takes."""


@functools.cache
def _is_supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def pdl_options(device: torch.device, *, weight: torch.Tensor | None = None) -> dict[str, bool]:
    """Keyword arguments for the launch of a kernel that calls the functions below.

    Args:
        weight: what a matrix-vector product reads; a large one begins when the kernel before it has ended.

    Returns:
        The constexpr ``PDL`` and, where the device can do it, Triton's option ``launch_pdl``, which is a part of the
        key under which a compiled kernel is found again.
    """
    is_large = weight is not None and weight.nbytes > LARGE_BYTES
    return {"PDL": True, "launch_pdl": True} if _is_supported(device) and not is_large else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the end of the kernel before this one."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the kernel behind this one to begin, once all programs have called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def start_after_previous(PDL: tl.constexpr):
    """``let_next_start`` and ``wait_for_previous``, for a kernel that has nothing to do before."""
    let_next_start(PDL)
    wait_for_previous(PDL)


@triton.jit
def prefetch_rows(matrix, row_start, begin, end, LENGTH: tl.constexpr, PDL: tl.constexpr):
    """Ask for a piece of some rows of constants to be brought into the L2 cache; nothing waits for it.

    Args:
        row_start: [rows] int64, where the rows begin.
        begin: of the piece within a row.
        end: nothing is read from here on.
        LENGTH: of the piece, a power of two.
    """
    if PDL:
        # An L2 cache reads 64 bytes from memory for one that is missing.
        STEP: tl.constexpr = 512 // matrix.dtype.element_ty.primitive_bitwidth
        column = tl.minimum(begin + tl.arange(0, LENGTH // STEP) * STEP, end - 1)
        address = (matrix + row_start[:, None] + column[None, :]).to(tl.int64)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [address], tl.int32, is_pure=False, pack=1)
