"""``lpm``: longest prefix match first, so that what is cached is used before it is displaced.

The ``WINDOW`` oldest sequences are ordered by how much of them the prefix cache holds; those behind them follow by
arrival. Nobody starves: whoever was passed over by ``MOST_PASSED`` younger ones goes before everybody who was not.

What the cache holds of a sequence is looked up when it gets into the window, and again every few steps in which there
is room for anybody: at most ``WINDOW`` look-ups in a step for newcomers, and ``REFRESHED`` more.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from core_engine.request import Sequence
from core_engine.waiting_queue import AGEING_S, WaitingQueue, arrival

if TYPE_CHECKING:
    from core_engine.replica import Replica

WINDOW = 64
REFRESHED = 8
MOST_PASSED = 128


class LongestPrefixFirst(WaitingQueue):
    """By arrival among those of which the cache holds equally much."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        super().__init__(ageing_s)
        self._sequences: list[Sequence] = []
        """By arrival."""
        self._num_cached: dict[Sequence, int] = {}
        """Tokens, as far as they were looked up; the one that was looked up longest ago is first."""
        self._num_passed: dict[Sequence, int] = {}
        """How many younger ones were admitted while it waited in the window, if any."""
        self._overdue: list[Sequence] = []
        """Those that were passed over ``MOST_PASSED`` times, by arrival."""
        self._order: list[Sequence] | None = None
        """The window by what is cached; None: not known."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._overdue
        if self._overdue:
            overdue = set(self._overdue)
            yield from (sequence for sequence in self._window() if sequence not in overdue)
            yield from (each for each in itertools.islice(self._sequences, WINDOW, None) if each not in overdue)
        else:
            yield from self._window()
            yield from itertools.islice(self._sequences, WINDOW, None)

    def push(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self._sequences, sequence.arrival, key=arrival)
        self._sequences.insert(index, sequence)
        self.num_prompt_tokens += sequence.prompt_len
        if index < WINDOW:
            self._order = None

    def remove(self, sequence: Sequence) -> None:
        self._take(sequence)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        index = self._take(sequence)
        counts = self._num_passed
        for passed in self._sequences[: min(index, WINDOW)]:
            count = counts[passed] = counts.get(passed, 0) + 1
            if count == MOST_PASSED:
                bisect.insort(self._overdue, passed, key=arrival)

    def refresh(self, replicas: Iterable[Replica]) -> None:
        managers = [replica.kv for replica in replicas if replica.kv.enable_prefix_caching]
        if not managers:
            return
        stale = list(itertools.islice(self._num_cached, REFRESHED))
        new = [sequence for sequence in self._sequences[:WINDOW] if sequence not in self._num_cached]
        for sequence in stale + new:
            found = max(kv.num_cached(sequence) for kv in managers)
            before = self._num_cached.pop(sequence, 0)
            self._num_cached[sequence] = found
            if found != before:
                self._order = None

    def _window(self) -> list[Sequence]:
        if self._order is None:
            cached = self._num_cached
            self._order = sorted(self._sequences[:WINDOW], key=lambda sequence: -cached.get(sequence, 0))
        return self._order

    def _take(self, sequence: Sequence) -> int:
        """Take it out; returns its place by arrival."""
        index = self._find(self._sequences, sequence, arrival)
        del self._sequences[index]
        self.num_prompt_tokens -= sequence.prompt_len
        self._num_cached.pop(sequence, None)
        if self._num_passed.pop(sequence, 0) >= MOST_PASSED:
            self._overdue.remove(sequence)
        if index < WINDOW and self._order is not None:
            self._order.remove(sequence)
            if len(self._sequences) >= WINDOW:
                self._order.append(self._sequences[WINDOW - 1])
        return index
