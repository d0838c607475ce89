"""The interface of a sampling component."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shared.messages import SlotInit

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRows:
    """Which slots take a token in this step, one entry for each row of the logits."""

    slots: Int64
    """On the host."""
    num_outputs: Int64
    """Tokens generated so far, on the host."""
    positions: torch.Tensor
    """[rows] int64 on the device: where the sampled token goes in its sequence."""
    num_tokens: Int64
    """Tokens known so far, the prompt's and the generated ones: ``positions`` on the host."""
    token_ids: torch.Tensor
    """[slots, max_model_len] int32 on the device: the known tokens of all slots, from the left."""

    def select(self, indices: Int64) -> SampleRows:
        """Some of the rows."""
        device = self.positions.device
        chosen = torch.from_numpy(indices).to(device)
        return SampleRows(
            slots=self.slots[indices],
            num_outputs=self.num_outputs[indices],
            positions=self.positions[chosen],
            num_tokens=self.num_tokens[indices],
            token_ids=self.token_ids,
        )


class Component(Protocol):
    """One rule about logits. Its parameters are kept by slot."""

    def add(self, request: SlotInit) -> None:
        """A request takes its slot; overwrites what the slot's last request left."""

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        """Change ``logits`` [rows, vocabulary] float32 in place; does nothing when no row needs it."""
