"""Which running sequences give their place to waiting ones that outrank them, where a policy knows such a thing.

Looked at before a step is planned. The waiting ones are taken in order: who finds a seat and blocks, those that are
about to come back included, takes them. Who does not gets them from the lowest of those that it outranks, newest first:
from as many as it needs, or from none if all of them were not enough, and there it ends. Nobody has to go while others
are on their way out, or while another replica has room. The places are taken when they are free, in the order of the
queue, in which who had to go is behind who made it go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np

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
    heads = itertools.islice(admissible, MOST_SERVED)
    head = next(heads, None)
    slots = replica.slots
    if head is None or not (slots.priority[slots.limit > 0] > head.request.priority).any():
        return []
    if any(_may_take(other, head, admission, config) for other in replicas if other is not replica):
        return []
    room = _Room(replica, admission, config)
    underway, budget = Underway(replica), config.max_prefill_tokens
    for sequence in itertools.chain([head], heads):
        if underway.makes_wait(sequence):
            continue
        budget -= len(sequence.tokens)
        if not room.take(sequence, waiting) or budget <= 0:
            break
    return room.leaving


class _Room:
    """Seats and blocks of a replica, once those have left that are about to, and those that have to."""

    def __init__(self, replica: Replica, admission: Admission, config: SchedulerConfig) -> None:
        going = replica.going()
        self.leaving: list[Sequence] = []
        self._replica = replica
        self._admission = admission
        self._going = set(going)
        self._seats = min(_seats(replica, config), replica.slots.num_free + len(going))
        self._blocks = replica.kv.pool.num_free + replica.kv.promised(going)
        self._newcomers = 0.0
        """Blocks that those that were let in are expected to ask for."""

    def take(self, sequence: Sequence, waiting: WaitingQueue) -> bool:
        """Let one in. Returns whether there is room, or will be."""
        kv = self._replica.kv
        wanted, seats, blocks = kv.num_blocks_wanted(sequence), self._seats, self._blocks
        leaving = list(self.leaving)
        victims = None
        while seats < 1 or blocks < wanted + self._reserve(sequence, leaving):
            if victims is None:
                victims = self._outranked(sequence, waiting)
            if not victims:
                return False
            victim = victims.pop()
            leaving.append(victim)
            seats += 1
            blocks += sum(block.ref == 1 for block in victim.blocks)
        self.leaving, self._seats, self._blocks = leaving, seats - 1, blocks - wanted
        self._newcomers += self._admission.own_growth(self._replica, sequence)
        return True

    def _outranked(self, sequence: Sequence, waiting: WaitingQueue) -> list[Sequence]:
        """Who has to go first is last."""
        slots = self._replica.slots
        lower = np.flatnonzero((slots.priority > sequence.request.priority) & (slots.limit > 0))
        gone = self._going.union(self.leaving)
        candidates = [each for each in slots.sequences[lower].tolist() if each not in gone]
        found = [each for each in candidates if waiting.outranks(sequence, each)]
        return sorted(found, key=lambda each: (each.request.priority, waiting.rank(each)))

    def _reserve(self, sequence: Sequence, leaving: list[Sequence]) -> int:
        replica = self._replica
        if replica.num_running == len(self._going) + len(leaving) and not self._newcomers:
            return 0
        growth = self._newcomers + self._admission.expected_growth(
            replica, [each.slot for each in leaving if each.slot is not None]
        )
        return self._admission.reserve(replica, sequence, growth)


def _seats(replica: Replica, config: SchedulerConfig) -> int:
    return config.max_num_seqs - int(replica.slots.decoding.sum()) - len(replica.prefilling)


def _may_take(replica: Replica, sequence: Sequence, admission: Admission, config: SchedulerConfig) -> bool:
    """Whether a replica admits the sequence now, or soon."""
    if replica.leaving or replica.reserved_for is not None:
        return False
    if replica.num_draining_preemptions:
        return True
    if min(_seats(replica, config), replica.slots.num_free) < 1:
        return False
    return replica.kv.pool.num_free >= replica.kv.num_blocks_wanted(sequence) + admission.reserve(replica, sequence)
