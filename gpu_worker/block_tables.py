"""Block tables: which KV blocks hold a slot's tokens, in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Int64 = npt.NDArray[np.int64]


class BlockTables:
    """Append-only tables on the device, with their lengths on the host.

    Attributes:
        tensor: [slots, max_blocks] int32; entries beyond a table's length are the null block.
        counts: [slots] int64, lengths.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        self.tensor = torch.zeros((num_slots, width), dtype=torch.int32, device=device)
        self.counts: Int64 = np.zeros(num_slots, np.int64)

    def append(self, slots: Int64, blocks: Int64) -> None:
        """Append ``blocks`` to the tables of ``slots``, in order; a slot may occur several times."""
        if not len(slots):
            return
        columns = self.counts[slots] + _occurrence(slots)
        np.add.at(self.counts, slots, 1)
        device = self.tensor.device
        rows, columns_t = torch.from_numpy(slots).to(device), torch.from_numpy(columns).to(device)
        self.tensor[rows, columns_t] = torch.from_numpy(blocks.astype(np.int32)).to(device)

    def clear(self, slots: Int64) -> None:
        """Empty the tables of ``slots``."""
        if len(slots):
            used = int(self.counts[slots].max())
            self.tensor[torch.from_numpy(slots).to(self.tensor.device), :used] = 0
            self.counts[slots] = 0

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens' keys and values go: ``block_table[pos // block_size] * block_size + pos % block_size``.

        Position 35 of a slot with the table [7, 2, 9] and blocks of 16 goes to 9 * 16 + 3 = 147. A position beyond the
        table goes to the null block.

        Args:
            slots: [tokens] int64.
            positions: [tokens] int64.

        Returns:
            [tokens] int64.
        """
        blocks = self.tensor[slots, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size


def _occurrence(values: Int64) -> Int64:
    """How often each value occurred before, at its place: [5, 7, 5, 5] to [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    runs = np.diff(np.r_[starts, len(ordered)])
    result = np.empty(len(values), np.int64)
    result[order] = np.arange(len(values)) - np.repeat(starts, runs)
    return result
