"""What is faster: copying KV blocks between device and host, or computing them again."""

from __future__ import annotations

import dataclasses

from core_engine.step_time import StepLoad, StepTimeModel


@dataclasses.dataclass(frozen=True, slots=True)
class TransferCosts:
    """Of one worker: its measured copy rates against its measured step times (``core_engine.step_time``)."""

    block_bytes: int
    rates: tuple[float, float]
    """Bytes per second to the host and to the device; 0: not known, and taken to be free."""
    step_time: StepTimeModel

    def copy_s(self, num_blocks: int, direction: int) -> float:
        """Seconds of copying blocks in a direction (``core_engine.transfers``)."""
        rate = self.rates[direction]
        return num_blocks * self.block_bytes / rate if rate > 0.0 else 0.0

    def compute_s(self, start: int, count: int) -> float:
        """Seconds by which steps get longer that compute ``count`` tokens of a prompt from ``start`` on."""
        costs = self.step_time.costs
        return costs.of(StepLoad(count, 0, count * (start + count / 2), True)) - costs.step
