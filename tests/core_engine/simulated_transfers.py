"""A worker's copies to host memory and back, as badly timed as they may be."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import numpy.typing as npt

from shared.messages import Step

EMPTY = -1
"""What a block holds that nobody wrote to."""


@dataclasses.dataclass(eq=False)
class PendingTransfer:
    number: int
    to_device: bool
    block: int
    host_block: int
    copied_in: int
    """Results until it is copied, before or after what is computed then."""
    complete_in: int
    """Results until it is complete."""
    is_copied: bool = False


class SimulatedTransfers:
    """Copies blocks at any moment between the step that says so and the result that says that it is done."""

    def __init__(self, kv: npt.NDArray[np.int64], block_size: int, num_host_blocks: int, seed: int) -> None:
        self.host = np.full((num_host_blocks, block_size), EMPTY, np.int64)
        self.pending: list[PendingTransfer] = []
        self._kv = kv.reshape(-1, block_size)
        self._rng = random.Random(seed)

    def seed(self, seed: int) -> None:
        """From now on other moments."""
        self._rng = random.Random(seed)

    def receive(self, step: Step) -> None:
        """The step has arrived; others in front of it may not be computed yet."""
        for direction, block, host_block in step.transfers.tolist():
            assert block != 0, "the null block is transferred"
            to_device = direction == 1
            for other in self.pending:
                reads_other = to_device and not other.to_device and other.host_block == host_block
                assert not reads_other, "a transfer reads what another one writes"
                assert to_device or other.host_block != host_block, "a block of the host is reused in flight"
                both = other.block == block and (to_device or other.to_device)
                assert not both, "a block is reused in flight"
            complete_in = self._rng.randint(0, 3)
            copied_in = self._rng.randint(0, complete_in)
            self.pending.append(PendingTransfer(step.number, to_device, block, host_block, copied_in, complete_in))
            if self._rng.random() < 0.3:
                self._copy(self.pending[-1])

    def writes(self, blocks: set[int]) -> bool:
        """Whether a pending transfer writes any of these blocks."""
        return any(each.to_device and each.block in blocks for each in self.pending)

    def pass_by(self) -> None:
        """What is due may be copied."""
        for each in self.pending:
            if each.copied_in <= 0 and self._rng.random() < 0.5:
                self._copy(each)

    def result(self, number: int, must_wait: bool) -> int:
        """``StepResult.transferred`` of the result of a step."""
        for each in self.pending:
            each.copied_in -= 1
            each.complete_in -= 1
            if each.complete_in < 0 or (must_wait and each.number <= number):
                self._copy(each)
        waiting = min((each.number for each in self.pending if not each.is_copied or each.complete_in >= 0), default=0)
        if must_wait:
            waiting = min((each.number for each in self.pending if each.number > number), default=0)
        transferred = min(number, waiting - 1) if waiting else number
        self.pending = [each for each in self.pending if each.number > transferred]
        return transferred

    def _copy(self, each: PendingTransfer) -> None:
        if each.is_copied:
            return
        each.is_copied = True
        if each.to_device:
            self._kv[each.block] = self.host[each.host_block]
        else:
            self.host[each.host_block] = self._kv[each.block]
