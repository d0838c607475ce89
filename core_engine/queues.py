"""The scheduling policies. Each is one class and one line in ``QUEUES``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core_engine.fair_queue import FairShare
from core_engine.prefix_queue import LongestPrefixFirst
from core_engine.request import Sequence
from core_engine.slot_table import Slots, SlotTable
from core_engine.waiting_queue import SortedQueue, WaitingQueue


class FirstComeFirstServed(SortedQueue):
    """By arrival, whatever was preempted in between."""

    def key(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.arrival


class PriorityWithAgeing(SortedQueue):
    """Lower priorities first; each ``ageing_s`` of waiting makes up for one level.

    All that wait age alike, so the order of two never changes, and the key is fixed at arrival: the time of arrival,
    ``ageing_s`` later for each level. Who comes takes the place of somebody of a lower priority, but only of one who
    is behind it by that key. So a request of priority p that arrived at t yields to those of priority q < p that arrive
    before t + (p - q) * ageing_s, and to nobody else: once these are done it runs to its end.
    """

    preempts = True

    def key(self, sequence: Sequence) -> tuple[float, int, int]:
        request = sequence.request
        return request.arrived_at + request.priority * self.ageing_s, request.order, sequence.choice

    def rank(self, sequence: Sequence) -> tuple[float, int, int]:
        return self.key(sequence)

    def outranks(self, sequence: Sequence, running: Sequence) -> bool:
        is_higher = sequence.request.priority < running.request.priority
        return is_higher and self.key(sequence) < self.key(running)

    def behind(self, sequence: Sequence, slots: SlotTable) -> npt.NDArray[np.bool_]:
        due, (own, order, _) = self._due(slots), self.key(sequence)
        is_behind: npt.NDArray[np.bool_] = (due > own) | ((due == own) & (slots.order > order))
        return is_behind & (slots.limit > 0)

    def outranked(self, sequence: Sequence, slots: SlotTable) -> Slots:
        """The lowest priority first, of equal ones who is last in the order."""
        found = np.flatnonzero(self.behind(sequence, slots) & (slots.priority > sequence.request.priority))
        return found[np.lexsort((slots.order[found], self._due(slots)[found], slots.priority[found]))[::-1]]

    def _due(self, slots: SlotTable) -> npt.NDArray[np.float64]:
        """[slots] what ``key`` begins with."""
        due: npt.NDArray[np.float64] = slots.arrived_at + slots.priority * self.ageing_s
        return due


QUEUES: dict[str, type[WaitingQueue]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAgeing,
    "fair": FairShare,
    "lpm": LongestPrefixFirst,
}
"""By the name that ``--scheduling-policy`` gives them."""
