"""Copies between the KV pool of a worker and its pool in host memory: queued for a step, in flight, complete.

    queued ──▶ Step n ──▶ in flight ──▶ StepResult.transferred >= n: complete

They wait for no step and no step waits for them: what they read is settled and held, and nobody but them knows what
they write until they are complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import chain

import numpy as np

from core_engine.block import Block, HostBlock
from shared.errors import ProtocolError
from shared.messages import Int32

TO_HOST, TO_DEVICE = 0, 1
_NONE: Int32 = np.empty((0, 3), np.int32)


class Transfer(ABC):
    """Blocks that are copied in one direction in one step. Each of them is held until that is complete."""

    direction = TO_HOST

    def __init__(self, pairs: list[tuple[Block, HostBlock]]) -> None:
        self.pairs = pairs

    @property
    @abstractmethod
    def leaving(self) -> list[Block]:
        """Blocks that it holds and will release when it is complete."""

    @abstractmethod
    def completed(self) -> None:
        """All is copied."""


class Transfers:
    """Those of one worker in one epoch."""

    def __init__(self) -> None:
        self._queued: list[Transfer] = []
        self._in_flight: deque[tuple[int, list[Transfer]]] = deque()
        self._transferred = 0

    def __len__(self) -> int:
        """Transfers that are not complete."""
        return len(self._queued) + sum(len(transfers) for _, transfers in self._in_flight)

    def __iter__(self) -> Iterator[Transfer]:
        for _, transfers in self._in_flight:
            yield from transfers
        yield from self._queued

    def queue(self, transfer: Transfer) -> None:
        """Have it go with the next step."""
        self._queued.append(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Take it back, if no step has it yet."""
        if transfer not in self._queued:
            return False
        self._queued.remove(transfer)
        return True

    def want_step(self, is_window_empty: bool) -> bool:
        """Whether a step without rows has to be sent: to take what is queued, or to report what is in flight."""
        return bool(self._queued) or (is_window_empty and bool(self._in_flight))

    def take(self, number: int) -> Int32:
        """[t, 3] ``Step.transfers`` of step ``number``: what is queued."""
        if not self._queued:
            return _NONE
        queued, self._queued = self._queued, []
        self._in_flight.append((number, queued))
        pairs = list(chain.from_iterable(each.pairs for each in queued))
        rows = np.empty((len(pairs), 3), np.int32)
        rows[:, 0] = np.repeat([each.direction for each in queued], [len(each.pairs) for each in queued])
        rows[:, 1] = [block.id for block, _ in pairs]
        rows[:, 2] = [host.id for _, host in pairs]
        return rows

    def reported(self, transferred: int, *, last: int) -> list[Transfer]:
        """A result says that the transfers of all steps up to ``transferred`` are complete; those that were not before.

        Args:
            last: number of the last step that was sent.

        Raises:
            ProtocolError: it is less than it was, or more than was sent.
        """
        if not self._transferred <= transferred <= last:
            raise ProtocolError(
                f"transfers of {transferred} steps are complete, after {self._transferred}, and of {last} at most"
            )
        self._transferred = transferred
        complete: list[Transfer] = []
        while self._in_flight and self._in_flight[0][0] <= transferred:
            complete += self._in_flight.popleft()[1]
        return complete
