"""Which of several replicas computes a waiting sequence: the one that is expected to have its first tokens soonest.

    expected time = steps in flight      what they should take, or have taken so far if that is longer
                  + prompts in front, and what the replica's prefix cache lacks of this one
                  + decode steps         those that carry these prompts, and ``TOKENS_AFTER`` more
                  + prefixes displaced   from its cache, as far as they are likely to be computed again

all by the costs that are fitted to the replica's own steps. A cached prefix draws the sequences that begin with it
until they would wait longer there than it takes to compute the prefix elsewhere; a worker that has stopped costs more
with each second; rows that run count with what they add to a step; and new prefixes go where the cache has room.

Nothing is assigned for good: the queue stays common, and whenever a replica plans, the sequences from the head of the
queue on are placed anew, one after another. The replica admits what falls to it and leaves to the others what falls to
them, if they have room for it *now*. So no sequence waits for a full replica while another has room, and on each
replica sequences start in the order of the queue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from core_engine.admission import Admission
from core_engine.replica import Replica
from core_engine.request import Sequence
from core_engine.sharing import startable
from core_engine.step_time import StepCosts, StepLoad

if TYPE_CHECKING:
    from core_engine.scheduler import SchedulerConfig

TOKENS_AFTER = 32
"""Decode steps that count beside the first token, so that a warm cache does not gather all rows on one replica."""


class Prospect:
    """What a newcomer would find at a replica: the work in front of it, and the room that is left.

    Args:
        costs: of its steps.
        now: seconds of the engine's clock.
    """

    def __init__(
        self, replica: Replica, costs: StepCosts, config: SchedulerConfig, admission: Admission, now: float
    ) -> None:
        slots = replica.slots
        self.replica = replica
        self._costs = costs
        self._reuse = replica.kv.pool.fill * replica.hit_rate
        """Tokens of cached prefixes that will have to be computed again for each token that is written."""
        self._admission = admission
        self._budget = min(config.max_num_batched_tokens, config.max_prefill_tokens)
        decoding = slots.decoding
        self.num_rows = replica.num_active
        """Sequences that run there, or were placed there, as rows of a step."""
        self._context = int(slots.num_tokens[decoding].sum())
        coming = 0 if replica.kv.host is None else replica.kv.host.num_seats
        self._room = min(config.max_num_seqs - self.num_rows, slots.num_free - coming)
        if replica.num_draining_preemptions or replica.leaving or replica.reserved_for is not None:
            self._room = 0
        self._num_free = replica.kv.pool.num_free
        self._growth: float | None = None
        self._num_tokens, self._num_pairs = 0, 0.0
        for sequence in replica.prefilling:
            self._add_prompt(sequence, int(slots.num_computed[sequence.slot]))
        planned_s = sum(self._costs.of(step.load) for step in replica.window)
        self._in_flight_s = max(planned_s, now - replica.progress_at) if replica.window else 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a slot for one more."""
        return self._room > 0

    def has_room_for(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether the replica could admit the sequence now, of which it caches ``num_cached`` tokens."""
        if self._room < sequence.request.num_seats:
            return False
        kv, admission = self.replica.kv, self._admission
        if self._growth is None:
            self._growth = admission.expected_growth(self.replica)
        reserve = admission.reserve(self.replica, sequence, self._growth)
        num_blocks, free = kv.blocks_for(len(sequence.tokens)), self._num_free - reserve
        if free >= num_blocks or free < num_blocks - num_cached // kv.block_size:
            return free >= num_blocks
        return free >= kv.num_blocks_wanted(sequence)

    def expected_s(self, sequence: Sequence, num_cached: int) -> float:
        """Seconds until it would have its first tokens there."""
        costs, length = self._costs, len(sequence.tokens)
        missing = length - num_cached
        tokens = self._num_tokens + missing
        pairs = self._num_pairs + missing * (num_cached + missing / 2)
        prefill_s = costs.of(StepLoad(tokens, 0, pairs, True)) - costs.step
        num_steps = -(-tokens // max(self._budget - self.num_rows, 1))
        num_rows = self.num_rows + sequence.request.num_seats
        decode_s = costs.of(StepLoad(num_rows, self._context + length, 0.0, False))
        displaced_s = costs.token * self._reuse * missing
        return self._in_flight_s + prefill_s + (num_steps + TOKENS_AFTER) * decode_s + displaced_s

    def place(self, sequence: Sequence, num_cached: int) -> None:
        """Count a sequence that goes there."""
        self._add_prompt(sequence, num_cached)
        self.num_rows += sequence.request.num_seats
        self._room -= sequence.request.num_seats
        self._num_free -= self.replica.kv.blocks_for(len(sequence.tokens)) - num_cached // self.replica.kv.block_size

    def _add_prompt(self, sequence: Sequence, num_computed: int) -> None:
        missing = len(sequence.tokens) - num_computed
        self._num_tokens += missing
        self._num_pairs += missing * (num_computed + missing / 2)
        self._context += len(sequence.tokens)


def choose(sequence: Sequence, prospects: Iterable[Prospect]) -> Prospect | None:
    """The replica that a sequence is placed on, and count it there; None: no replica has room for it.

    Of equal ones it is the one with the fewest rows, then the first.
    """
    choices = []
    for prospect in prospects:
        if prospect.is_open and prospect.replica.may_hold(sequence):
            kv = prospect.replica.kv
            num_cached = num_reachable = kv.num_cached(sequence)
            if kv.host is not None:
                num_reachable = kv.host.num_reachable(sequence, num_cached)
            choices.append((prospect.expected_s(sequence, num_reachable), prospect.num_rows, prospect, num_cached))
    for _, _, prospect, num_cached in sorted(choices, key=lambda choice: choice[:2]):
        if prospect.has_room_for(sequence, num_cached):
            prospect.place(sequence, num_cached)
            return prospect
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Router:
    """Splits the waiting sequences among all ``replicas`` of an engine, a list that the engine keeps."""

    replicas: SequenceOf[Replica]
    admission: Admission

    def prospects(self, config: SchedulerConfig, now: float) -> list[Prospect]:
        """One for each replica. A worker that was not timed yet is taken to be as fast as another that was."""
        models = [replica.step_time for replica in self.replicas]
        timed = next((model for model in models if model.most_tokens), models[0])
        costs = [(model if model.most_tokens else timed).costs for model in models]
        return [
            Prospect(replica, cost, config, self.admission, now)
            for replica, cost in zip(self.replicas, costs, strict=True)
        ]

    def sequences_for(
        self, replica: Replica, waiting: Callable[[], Iterable[Sequence]], config: SchedulerConfig, now: float
    ) -> Iterator[Sequence]:
        """The waiting sequences that ``replica`` should admit (``startable``)."""
        prospects = self.prospects(config, now)
        own = next(prospect for prospect in prospects if prospect.replica is replica)
        others = [prospect for prospect in prospects if prospect is not own and prospect.is_open]

        def goes_elsewhere(sequence: Sequence) -> bool:
            return bool(others) and choose(sequence, (own, *others)) not in (own, None)

        return startable(replica, waiting, goes_elsewhere)
