"""What a scheduling policy is: an order of the sequences that wait, and of those that run and may have to give way."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from core_engine.request import Sequence

if TYPE_CHECKING:
    from core_engine.replica import Replica
    from core_engine.slot_table import Slots, SlotTable

AGEING_S = 30.0


class WaitingQueue(ABC):
    """Holds each waiting sequence once.

    Args:
        ageing_s: seconds of waiting that outweigh one level of priority, where the policy looks at it.
    """

    preempts = False
    """Whether a sequence that waits may take the place of one that runs (``outranks``)."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self.ageing_s = ageing_s
        self.num_prompt_tokens = 0
        """Of all that wait, those of each choice."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission. The first few cost little; not to be continued after a change."""

    @abstractmethod
    def push(self, sequence: Sequence) -> None:
        """Add a new or a preempted sequence; a preempted one takes its old place again."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is aborted, or rests.

        Raises:
            KeyError: it does not wait here.
        """

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Take out a sequence that starts, of whose tokens ``num_cached`` need not be computed.

        Raises:
            KeyError: it does not wait here.
        """
        self.remove(sequence)

    def served(self, sequences: SequenceOf[Sequence]) -> None:  # noqa: B027 (most policies need not know)
        """Each of them got a token."""

    def refresh(self, replicas: Iterable[Replica]) -> None:  # noqa: B027
        """Called when a replica has room, before it looks at the order."""

    def rank(self, sequence: Sequence) -> Any:
        """Orders running sequences: the last one is the first to give way when memory is short.

        As long as it does not change, the first one is never preempted, so that there is always one that gets on.
        """
        return sequence.request.priority, sequence.arrival

    def outranks(self, sequence: Sequence, running: Sequence) -> bool:
        """Whether one that waits takes the place of one that runs, if there is no other.

        It then stands before it in the queue, too, so that nothing comes back at once to where it had to leave.
        """
        return False

    def behind(self, sequence: Sequence, slots: SlotTable) -> npt.NDArray[np.bool_]:
        """[slots] those that ``sequence``, or anybody behind it in the queue, might outrank."""
        return np.zeros(slots.num_slots, np.bool_)

    def outranked(self, sequence: Sequence, slots: SlotTable) -> Slots:
        """The slots whose sequences ``sequence`` outranks; who has to go first is first."""
        return np.empty(0, np.intp)

    def _find(self, sequences: list[Sequence], sequence: Sequence, key: Callable[[Sequence], Any]) -> int:
        """Where ``sequence`` is in a list that is sorted by a unique ``key``.

        Raises:
            KeyError: nowhere.
        """
        index = bisect.bisect_left(sequences, key(sequence), key=key)
        if index == len(sequences) or sequences[index] is not sequence:
            raise KeyError(sequence)
        return index


class SortedQueue(WaitingQueue):
    """By a key that stays the same from arrival on."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        super().__init__(ageing_s)
        self._sequences: list[Sequence] = []

    @abstractmethod
    def key(self, sequence: Sequence) -> Any:
        """Unique, and ordered."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=self.key)
        self.num_prompt_tokens += sequence.prompt_len

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[self._find(self._sequences, sequence, self.key)]
        self.num_prompt_tokens -= sequence.prompt_len


def first_not_in(passed: set[Sequence], waiting: Iterable[Sequence], most: int) -> Sequence | None:
    """The first of ``waiting`` that was not passed over; None: there is none, or ``most`` were passed over."""
    if len(passed) >= most:
        return None
    return next((sequence for sequence in waiting if sequence not in passed), None)


def arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival
