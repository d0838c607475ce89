"""What some slots have, put together for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import Int64

Part = TypeVar("Part")
Staged = TypeVar("Staged")


class SlotLists(Generic[Part, Staged]):
    """A part for some slots, and the parts of a step's rows staged on the device; a slot without one costs nothing.

    What was staged last is kept: from one decode step to the next the same slots come again, and nothing is copied.

    Args:
        stage: makes what a step needs from [some] indices of rows, [some] slots of these rows, and their parts.
    """

    def __init__(self, stage: Callable[[Int64, Int64, list[Part]], Staged]) -> None:
        self._stage = stage
        self._parts: dict[int, Part] = {}
        self._kept: tuple[bytes, Staged] | None = None

    def put(self, slot: int, part: Part | None) -> None:
        """``part`` takes the place of what ``slot`` had; None: it has none."""
        if self._parts.pop(slot, None) is not None or part is not None:
            self._kept = None
        if part is not None:
            self._parts[slot] = part

    def of(self, slots: Int64, among: npt.NDArray[np.bool_] | None = None) -> Staged | None:
        """What is staged for the rows whose slots have a part; None: no row has one.

        Args:
            slots: [rows].
            among: [rows] which rows to look at; None: all.
        """
        if not self._parts:
            return None
        key = slots.tobytes() + (among.tobytes() if among is not None else b"")
        if self._kept is None or self._kept[0] != key:
            wanted = slots.tolist() if among is None else np.where(among, slots, -1).tolist()
            rows = np.array([row for row, slot in enumerate(wanted) if slot in self._parts], np.int64)
            if not len(rows):
                return None
            parts = [self._parts[slot] for slot in slots[rows].tolist()]
            self._kept = key, self._stage(rows, slots[rows], parts)
        return self._kept[1]


class RowIds(NamedTuple):
    """Token ids of some rows, one entry for each id."""

    chosen: torch.Tensor
    """[some] int64: the rows that have ids."""
    row: torch.Tensor
    """[entries] int64."""
    ids: torch.Tensor
    """[entries] int64."""


def stage_ids(device: torch.device) -> Callable[[Int64, Int64, list[Int64]], RowIds]:
    """For ``SlotLists`` whose parts are token ids."""

    def stage(rows: Int64, slots: Int64, parts: list[Int64]) -> RowIds:
        row = np.repeat(rows, [len(part) for part in parts])
        chosen, row_tensor, ids = (torch.from_numpy(a).to(device) for a in (rows, row, np.concatenate(parts)))
        return RowIds(chosen, row_tensor, ids)

    return stage


def ids_or_none(ids: Sequence[int] | None) -> Int64 | None:
    """Token ids as a part of ``SlotLists``; None where there are none."""
    return np.array(ids, np.int64) if ids else None
