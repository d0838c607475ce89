"""What the device knows about running requests, by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.messages import SlotInit

Int64 = npt.NDArray[np.int64]


class RequestState:
    """Token ids and lengths of the requests in their slots.

    The device owns the values of tokens and the positions; the host keeps lengths as they will be once all steps that
    were launched have run, so that it never waits for a result to launch the next step.

    Attributes:
        token_ids: [slots * max_model_len] int32 on the device, row after row.
        num_tokens: [slots] int64 on the device.
        prompt_len: [slots] int64 on the device.
        limit: [slots] int64 on the device; no token is written at or beyond it.
        host_tokens: [slots] int64, lengths on the host.
        host_prompt: [slots] int64.
        host_limit: [slots] int64.
        active: [slots] bool, slots that hold a request.
    """

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self.num_slots, self.max_model_len, self.device = num_slots, max_model_len, device
        self.token_ids = torch.empty(num_slots * max_model_len, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.limit = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.host_tokens: Int64 = np.zeros(num_slots, np.int64)
        self.host_prompt: Int64 = np.zeros(num_slots, np.int64)
        self.host_limit: Int64 = np.zeros(num_slots, np.int64)
        self.active = np.zeros(num_slots, np.bool_)

    def add(self, new: list[SlotInit], tokens: npt.NDArray[np.int32]) -> None:
        """Requests take their slots; ``tokens`` are their known ids, one request after another."""
        if not new:
            return
        slots = np.array([request.slot for request in new], np.int64)
        lengths = np.array([request.num_tokens for request in new], np.int64)
        self.host_tokens[slots] = lengths
        self.host_prompt[slots] = [request.prompt_len for request in new]
        self.host_limit[slots] = [request.limit for request in new]
        self.active[slots] = True
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

    def release(self, slots: Int64) -> None:
        """The requests in ``slots`` are gone."""
        self.active[slots] = False

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
        self.host_tokens[host_slots] = np.minimum(self.host_tokens[host_slots] + 1, self.host_limit[host_slots])

    def staged(self, array: npt.NDArray[np.int32] | Int64) -> torch.Tensor:
        """An array of the host on the device; the copy is the caller's."""
        return torch.tensor(array, device=self.device)
