"""What the host knows about the slots: lengths as they will be once all steps that were launched have run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.messages import SlotInit

Int64 = npt.NDArray[np.int64]


class HostSlots:
    """Numbers by slot, kept on the host so that a step is launched without a look at the device.

    Attributes:
        host_tokens: [slots] int64, known tokens, those in flight included.
        host_prompt: [slots] int64.
        host_limit: [slots] int64; no token is written at or beyond it.
        active: [slots] bool, slots that hold a request.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.host_tokens: Int64 = np.zeros(num_slots, np.int64)
        self.host_prompt: Int64 = np.zeros(num_slots, np.int64)
        self.host_limit: Int64 = np.zeros(num_slots, np.int64)
        self.active = np.zeros(num_slots, np.bool_)

    def enter(self, new: list[SlotInit]) -> tuple[Int64, Int64]:
        """Requests take their slots: [new] slots, [new] known tokens."""
        slots = np.array([request.slot for request in new], np.int64)
        lengths = np.array([request.num_tokens for request in new], np.int64)
        self.host_tokens[slots] = lengths
        self.host_prompt[slots] = [request.prompt_len for request in new]
        self.host_limit[slots] = [request.limit for request in new]
        self.active[slots] = True
        return slots, lengths

    def release(self, slots: Int64) -> None:
        """The requests in ``slots`` are gone."""
        self.active[slots] = False

    def appended(self, slots: Int64) -> None:
        """A token will be sampled for each of these slots."""
        self.host_tokens[slots] = np.minimum(self.host_tokens[slots] + 1, self.host_limit[slots])
