"""Steps with prefills in fixed shapes, so that a CUDA graph can hold them.

The tokens of such a step lie in two parts of fixed sizes: decode rows, one token each, then prefill tokens. What a part
lacks is filled with the padding slot, whose tokens are written nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kernels.prefill_plan import COLUMNS, TileCut, max_items, prefill_items
from shared.messages import Epoch, Step
from shared.step_shapes import ROWS, padded_rows, padded_total, padded_totals

Int32 = npt.NDArray[np.int32]

MAX_TOKENS = 2048
"""Prefill tokens. A step with more of them computes for longer than it takes to launch."""
MAX_PREFILLS = 32
ROWS_AHEAD = 256
"""Decode rows up to which shapes are captured in idle moments."""


class MixedShape(NamedTuple):
    """What the launches of a step depend on."""

    rows: int
    """Decode rows, padding included."""
    tokens: int
    """Prefill tokens, padding included."""
    cut: TileCut
    """Of attention."""

    @property
    def num_items(self) -> int:
        return 1 + max_items(self.tokens, MAX_PREFILLS, self.cut)

    @property
    def num_samples(self) -> int:
        return self.rows + MAX_PREFILLS

    @property
    def size(self) -> int:
        """int32 values of ``pack``."""
        return self.rows + 4 * (MAX_PREFILLS + 1) + COLUMNS * self.num_items + 2 * self.num_samples

    def unpack(self, packed: torch.Tensor) -> MixedInputs:
        """Views of ``packed`` [size] int32."""
        sizes = [self.rows, 4 * (MAX_PREFILLS + 1), COLUMNS * self.num_items, self.num_samples, self.num_samples]
        slots, spans, items, sample, sample_slots = torch.split(packed[: self.size], sizes)
        return MixedInputs(slots, spans.view(-1, 4), items.view(-1, COLUMNS), sample, sample_slots)


class MixedInputs(NamedTuple):
    """int32 on the device."""

    slots: torch.Tensor
    """[rows]."""
    spans: torch.Tensor
    """[MAX_PREFILLS + 1, 4] as of ``gather_span_inputs``, among the prefill tokens."""
    items: torch.Tensor
    """[num_items, COLUMNS] as of ``prefill_items``, among all tokens."""
    sample: torch.Tensor
    """[num_samples] the token whose logits are wanted."""
    sample_slots: torch.Tensor
    """[num_samples]."""


def shape_of(step: Step, cut: TileCut, max_rows: int) -> MixedShape | None:
    """The least shape that holds a step; None: none does."""
    num_tokens, rows = int(step.prefill[:, 2].sum()), padded_rows(len(step.decode))
    if rows is None or len(step.decode) > max_rows or num_tokens > MAX_TOKENS or len(step.prefill) > MAX_PREFILLS:
        return None
    rows = min(rows, max_rows)
    shape = MixedShape(rows, padded_total(rows + num_tokens) - rows, cut)
    return shape if len(step.sample) <= shape.num_samples else None


def largest_shape(cut: TileCut) -> MixedShape:
    """No shape has a part that is larger than this one's."""
    return MixedShape(ROWS[-1], padded_total(ROWS[-1] + MAX_TOKENS), cut)


def shapes_ahead(cut: TileCut, max_rows: int) -> Iterator[MixedShape]:
    """The commonest shapes of a server, few decode rows and few tokens first."""
    for rows in dict.fromkeys(min(rows, max_rows) for rows in ROWS if rows <= ROWS_AHEAD):
        for total in padded_totals(rows, rows + MAX_TOKENS):
            yield MixedShape(rows, total - rows, cut)


def empty_step() -> Step:
    """A step that asks for nothing: packed, it is padding alone."""
    arrays = {name: np.empty((0, columns) if columns else 0, np.int32) for name, columns in Step.ARRAYS.items()}
    return Step(epoch=Epoch(0, 0), number=0, new=[], **arrays)


def pack(shape: MixedShape, padding_slot: int, step: Step) -> Int32:
    """[shape.size] all rows of a step, for ``unpack``."""
    decode, prefill, samples = step.decode, step.prefill, step.sample
    slots = np.full(shape.rows, padding_slot, np.int32)
    slots[: len(decode)] = decode
    counts = prefill[:, 2]
    ends = np.cumsum(counts, dtype=np.int32)
    first = ends - counts
    total = int(counts.sum())
    spans = np.zeros((MAX_PREFILLS + 1, 4), np.int32)
    spans[:, 0] = padding_slot
    spans[: len(prefill), :3], spans[: len(prefill), 3] = prefill, first
    spans[len(prefill), 2:] = shape.tokens - total, total
    contexts = np.stack([prefill[:, 0], shape.rows + first, counts, prefill[:, 1] + counts], 1)
    items = np.zeros((shape.num_items, COLUMNS), np.int32)
    made = prefill_items(contexts.astype(np.int32), shape.cut)
    items[: len(made)] = made
    sample = np.zeros(shape.num_samples, np.int32)
    sample_slots = np.full(shape.num_samples, padding_slot, np.int32)
    rows = samples[:, 0]
    last = np.concatenate([shape.rows + ends - 1, np.arange(len(decode))])
    sample[: len(rows)], sample_slots[: len(rows)] = last[rows], samples[:, 1]
    return np.concatenate([slots, spans.reshape(-1), items.reshape(-1), sample, sample_slots])
