"""Which running sequences give their place to waiting ones that outrank them, where a policy knows such a thing.

Looked at before a step is planned. The waiting ones are taken in order: who finds a seat and blocks, those that are
about to come back included, takes them. Who does not gets them from the lowest of those that it outranks, newest first:
from as many as it needs, or from none if all of them were not enough, and there it ends. Nobody has to go while others
are on their way out, or while the first one finds room now, here or on another replica. The places are taken when they
are free, in the order of the queue, in which who had to go is behind who made it go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from core_engine.admission import Admission
from core_engine.replica import Replica
from core_engine.request import Sequence
from core_engine.sharing import Underway
from core_engine.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from core_engine.scheduler import SchedulerConfig

MOST_SERVED = 64
"""Waiting sequences that are looked at in one step."""


def who_gives_way(
    replica: Replica,
    replicas: SequenceOf[Replica],
    waiting: WaitingQueue,
    admissible: Iterable[Sequence],
    admission: Admission,
    config: SchedulerConfig,
) -> list[Sequence]:
    """Sequences of ``replica`` to preempt now.

    Args:
        replicas: all of them.
        admissible: those of ``waiting`` that this replica may admit, in order.
    """
    if replica.leaving or replica.num_draining_preemptions or replica.reserved_for is not None:
        return []
    heads = iter(admissible)
    head = next(heads, None)
    if head is None or not _any_behind(replica, head, waiting):
        return []
    underway, budget = Underway(replica), config.max_prefill_tokens
    room: _Room | None = None
    for sequence in itertools.islice(itertools.chain([head], heads), MOST_SERVED):
        if underway.makes_wait(sequence):
            continue
        if room is None:
            if any(_may_take(each, sequence, admission, config) for each in replicas):
                return []
            room = _Room(replica, admission, config)
        budget -= len(sequence.tokens)
        if not room.take(sequence, waiting) or budget <= 0:
            break
    return [] if room is None else room.leaving


class _Room:
    """Seats and blocks of a replica, once those have left that are about to, and those that have to."""

    def __init__(self, replica: Replica, admission: Admission, config: SchedulerConfig) -> None:
        going = replica.going()
        self.leaving: list[Sequence] = []
        """One of each search."""
        self._replica = replica
        self._admission = admission
        self._going = set(going)
        self._seats = min(config.max_num_seqs - replica.num_active, replica.slots.num_free + len(going))
        self._blocks = replica.kv.pool.num_free + replica.kv.promised(going)
        self._newcomers = 0.0
        """Blocks that those that were let in are expected to ask for."""

    def take(self, sequence: Sequence, waiting: WaitingQueue) -> bool:
        """Let one in. Returns whether there is room, or will be."""
        kv, own_seats = self._replica.kv, sequence.request.num_seats
        wanted, seats, blocks = kv.num_blocks_wanted(sequence), self._seats, self._blocks
        leaving = list(self.leaving)
        victims: Iterator[Sequence] | None = None
        while seats < own_seats or blocks < wanted + self._reserve(sequence, leaving):
            victims = victims or self._outranked(sequence, waiting)
            victim = next((each for each in victims if each not in leaving), None)
            if victim is None:
                return False
            leaving.append(victim)
            seats += victim.request.num_seats
            blocks += kv.promised(_party(victim))
        self.leaving, self._seats, self._blocks = leaving, seats - own_seats, blocks - wanted
        self._newcomers += self._admission.own_growth(self._replica, sequence)
        return True

    def _outranked(self, sequence: Sequence, waiting: WaitingQueue) -> Iterator[Sequence]:
        """Who has to go first is first; those that go anyhow are not among them."""
        slots, searches = self._replica.slots, self._replica.searches
        pending = [search.leader for search in searches if search.is_pending]
        found = (each for each in slots.sequences[waiting.outranked(sequence, slots)] if each not in self._going)
        if not any(waiting.outranks(sequence, each) for each in pending):
            return map(_leader, found)
        every = [*map(_leader, found), *(each for each in pending if waiting.outranks(sequence, each))]
        return iter(sorted(every, key=lambda each: (each.request.priority, waiting.rank(each)), reverse=True))

    def _reserve(self, sequence: Sequence, leaving: list[Sequence]) -> int:
        replica = self._replica
        slots = [each.slot for party in map(_party, leaving) for each in party if each.slot is not None]
        if replica.num_running == len(self._going) + len(slots) and not self._newcomers:
            return 0
        growth = self._newcomers + self._admission.expected_growth(replica, slots)
        return self._admission.reserve(replica, sequence, growth)


def _any_behind(replica: Replica, head: Sequence, waiting: WaitingQueue) -> bool:
    """Whether anything could have to go for ``head``, or for anybody behind it."""
    if waiting.behind(head, replica.slots).any():
        return True
    return any(search.is_pending and waiting.rank(head) < waiting.rank(search.leader) for search in replica.searches)


def _leader(sequence: Sequence) -> Sequence:
    """Who stands for a running sequence: all beams of a search go together."""
    search = sequence.request.search
    return sequence if search is None else search.leader


def _party(sequence: Sequence) -> list[Sequence]:
    """Those that leave together with a running sequence."""
    search = sequence.request.search
    return [sequence] if search is None else search.live


def _may_take(replica: Replica, sequence: Sequence, admission: Admission, config: SchedulerConfig) -> bool:
    """Whether a replica admits the sequence now, or soon."""
    if replica.leaving or replica.reserved_for is not None:
        return False
    if replica.num_draining_preemptions:
        return True
    if replica.num_active + sequence.request.num_seats > config.max_num_seqs or not replica.slots.num_free:
        return False
    return replica.kv.pool.num_free >= replica.kv.num_blocks_wanted(sequence) + admission.reserve(replica, sequence)
