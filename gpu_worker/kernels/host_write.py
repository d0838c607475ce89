"""Results written to host memory by the GPU itself.

A copy engine takes the copies of all streams in the order in which they came: a few tokens would wait behind megabytes
of KV blocks, and the step after them too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def write_to_host(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Copy ``tensor`` to ``host``, bit for bit, on the current stream.

    Args:
        tensor: of any dtype, contiguous; a multiple of 4 bytes.
        host: as large; page-locked, and kept until the copy is done.
    """
    words, host_words = tensor.view(-1).view(torch.int32), host.view(-1).view(torch.int32)
    assert words.numel() == host_words.numel()
    if words.numel():
        _write_kernel[(triton.cdiv(words.numel(), BLOCK),)](words, host_words, words.numel(), BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["words_ptr", "host_ptr"])
def _write_kernel(words_ptr, host_ptr, size, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host_ptr + word, tl.load(words_ptr + word, word < size), word < size)
