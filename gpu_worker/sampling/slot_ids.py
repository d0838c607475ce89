"""Lists of token ids that some slots have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows


class SlotIds:
    """Token ids by slot, on the device; a slot without any costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ids: dict[int, torch.Tensor] = {}

    def put(self, slot: int, ids: Sequence[int]) -> None:
        """``ids`` take the place of what ``slot`` had; there may be none."""
        self.ids.pop(slot, None)
        if ids:
            self.ids[slot] = torch.tensor(ids, dtype=torch.int64, device=self.device)

    def rows_with_ids(self, rows: SampleRows) -> list[int]:
        """Indices of the rows whose slots have ids."""
        return [row for row, slot in enumerate(rows.slots.tolist()) if slot in self.ids] if self.ids else []

    def of(self, rows: SampleRows, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of these rows, one entry for each: [entries] int64 rows and [entries] int64 token ids."""
        parts = [self.ids[int(rows.slots[row])] for row in chosen]
        row = np.repeat(np.array(chosen, np.int64), [len(part) for part in parts])
        return torch.from_numpy(row).to(self.device), torch.cat(parts)
