"""The waiting sequences in the order in which they are admitted. A policy is one class and one line in ``QUEUES``."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Protocol

from core_engine.request import Sequence


class WaitingQueue(Protocol):
    """Holds each waiting sequence once."""

    num_prompt_tokens: int
    """Of all that wait, those of each choice."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission."""

    def push(self, sequence: Sequence) -> None:
        """Add a new or a preempted sequence; a preempted one takes its old place again."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is admitted or aborted.

        Raises:
            KeyError: it does not wait here.
        """


class FirstComeFirstServed:
    """By arrival, whatever was preempted in between."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=_arrival)
        self.num_prompt_tokens += sequence.prompt_len

    def remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self._sequences, sequence.arrival, key=_arrival)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise KeyError(sequence)
        del self._sequences[index]
        self.num_prompt_tokens -= sequence.prompt_len


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival


QUEUES: dict[str, type[WaitingQueue]] = {"fcfs": FirstComeFirstServed}
