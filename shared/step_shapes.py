"""Sizes to which a GPU worker pads the steps of its CUDA graphs; a scheduler that knows them wastes nothing."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

ROWS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024)
"""Decode rows beside prefill tokens."""
GRANULES = ((512, 128), (0, 64))
"""(above, multiple) of the tokens of a step with prefills, padded decode rows included: tiles of its products are 128
tokens high, and a step between two multiples computes the rest for nothing."""


def padded_rows(rows: int) -> int | None:
    """What a number of decode rows is padded to, beside prefill tokens; None: it is more than any graph holds."""
    index = bisect.bisect_left(ROWS, rows)
    return ROWS[index] if index < len(ROWS) else None


def padded_total(tokens: int) -> int:
    """What a step's tokens are padded to, prefill tokens and padded decode rows together."""
    return -(-tokens // _multiple(tokens)) * _multiple(tokens)


def padded_totals(above: int, most: int) -> Iterator[int]:
    """All that ``padded_total`` gives for more than ``above`` tokens, up to ``most``."""
    total = padded_total(above + 1)
    while total <= most:
        yield total
        total = padded_total(total + 1)


def whole_total(tokens: int) -> int:
    """The most tokens, and no more than so many, that need no padding."""
    return tokens // _multiple(tokens) * _multiple(tokens)


def _multiple(tokens: int) -> int:
    return next(multiple for above, multiple in GRANULES if tokens > above or not above)
