"""What the device knows about running requests, by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.host_slots import HostSlots, Int64
from shared.messages import SlotInit


class RequestState(HostSlots):
    """Token ids and lengths of the requests in their slots.

    The device owns the values of tokens and the positions; the host keeps lengths as they will be once all steps that
    were launched have run, so that it never waits for a result to launch the next step.

    Attributes:
        token_ids: [slots * max_model_len] int32 on the device, row after row.
        num_tokens: [slots] int64 on the device.
        prompt_len: [slots] int64 on the device.
        limit: [slots] int64 on the device; no token is written at or beyond it.
    """

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        super().__init__(num_slots, max_model_len)
        self.device = device
        self.token_ids = torch.empty(num_slots * max_model_len, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.limit = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def add(self, new: list[SlotInit], tokens: npt.NDArray[np.int32]) -> None:
        """Requests take their slots; ``tokens`` are their known ids, one request after another."""
        if not new:
            return
        slots, lengths = self.enter(new)
        starts = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(slots * self.max_model_len - starts, lengths)
        self.token_ids[self.staged(places)] = self.staged(tokens)
        rows = self.staged(slots)
        for device_array, host in (
            (self.num_tokens, self.host_tokens),
            (self.prompt_len, self.host_prompt),
            (self.limit, self.host_limit),
        ):
            device_array[rows] = self.staged(host[slots])

    def append(self, slots: torch.Tensor, host_slots: Int64, tokens: torch.Tensor) -> None:
        """Append one sampled token to each slot that has not reached its limit. Needs no value on the host.

        Args:
            slots: [rows] int64, distinct.
            tokens: [rows] int64.
        """
        lengths, limits = self.num_tokens[slots], self.limit[slots]
        room = lengths < limits
        places = slots * self.max_model_len + torch.minimum(lengths, limits - 1)
        self.token_ids[places] = torch.where(room, tokens.int(), self.token_ids[places])
        self.num_tokens[slots] = lengths + room
        self.appended(host_slots)

    def staged(self, array: npt.NDArray[np.int32] | Int64) -> torch.Tensor:
        """An array of the host on the device; the copy is the caller's."""
        return torch.tensor(array, device=self.device)
