"""What a waiting sequence shares with those that run, beyond the prefix cache.

*Forks*: in the step that completes a prompt the other choices of its request take slots, share every block of it by
reference, and sample from the same forward row. A partial last block is borrowed: the first token that a fork writes
into it copies it (copy on write).

*Prefixes underway*: a block can be found in the cache once its step is settled. A sequence that would find much of its
prompt there a little later is passed over for as long: two newcomers with one new prefix compute it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from core_engine.admission import Admission
from core_engine.replica import Replica
from core_engine.request import Sequence
from core_engine.waiting_queue import first_not_in

LEAST_COMMON = 64
"""Tokens of a prefix that is worth waiting for."""
LEAST_SHARE = 4
"""One in so many of the tokens that are to be computed must be saved."""
MOST_LOOKED_AT = 64
"""Waiting sequences that a step passes over before it looks no further."""
MOST_COMPARED = 8
"""Sequences with the same first block that a newcomer is compared with, the last ones to start."""


def startable(
    replica: Replica,
    waiting: Callable[[], Iterable[Sequence]],
    goes_elsewhere: Callable[[Sequence], bool] = lambda sequence: False,
) -> Iterator[Sequence]:
    """The waiting sequences that ``replica`` should start, in order; each is started, or begins to be loaded, before
    the next is asked for. None of them has to wait for a prompt that is being computed and that it will share.

    Args:
        waiting: gives those that wait now, in order.
        goes_elsewhere: whether another replica should start it.
    """
    underway, passed = Underway(replica), set[Sequence]()
    while (sequence := first_not_in(passed, waiting(), MOST_LOOKED_AT)) is not None:
        if sequence.load is not None or goes_elsewhere(sequence) or underway.makes_wait(sequence):
            passed.add(sequence)
            continue
        yield sequence
        if sequence.slot is None:
            passed.add(sequence)  # it waits for what is copied from host memory
        else:
            underway.add(sequence)


class Underway:
    """The sequences of a replica whose prompts are being computed, and whose blocks are not in its cache yet."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._by_first: defaultdict[bytes, list[Sequence]] = defaultdict(list)
        in_flight = [sequence for step in replica.window for sequence, _ in step.prefills]
        for sequence in dict.fromkeys([*in_flight, *replica.prefilling]):
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """One more has been admitted."""
        first = self._replica.kv.first_digest(sequence)
        if first is not None:
            self._by_first[first].append(sequence)

    def makes_wait(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence had better wait for what is being computed."""
        if _is_fresh(sequence) and any(map(_computes_prompt, sequence.request.sequences)):
            return True  # it will be a fork
        if sequence.load is not None:
            return True
        if sequence.scoring or not self._by_first:
            return False
        first = self._replica.kv.first_digest(sequence)
        alike = self._by_first.get(first) if first is not None else None
        return alike is not None and self._gains(sequence, alike[-MOST_COMPARED:])

    def _gains(self, sequence: Sequence, alike: list[Sequence]) -> bool:
        kv, length = self._replica.kv, len(sequence.tokens)
        num_cached = kv.num_cached(sequence)
        least = max(1, (length - num_cached) // LEAST_SHARE)
        for other in alike:
            if other.exit is None and other.slot is not None:
                whole = min(_common(sequence, other), length - 1) // kv.block_size * kv.block_size
                if whole >= LEAST_COMMON and whole - num_cached >= least:
                    return True
        return False


def forks_of(replica: Replica, sequence: Sequence, admission: Admission, most: int) -> list[Sequence]:
    """Waiting choices that start now that the prompt of ``sequence`` will be computed, at most ``most`` of them.

    Each needs a slot, and leaves free what those that run are expected to write.
    """
    request = sequence.request
    if len(request.sequences) == 1 or request.search is not None or not _is_fresh(sequence):
        return []
    waiting = [each for each in request.sequences if each is not sequence and _may_fork(each)]
    found: list[Sequence] = []
    growth = admission.expected_growth(replica) if waiting else 0.0
    for sibling in waiting[: max(0, min(most, replica.slots.num_free))]:
        growth = admission.reserve(replica, sibling, growth)
        if growth + 1 >= replica.kv.pool.num_free:
            break
        found.append(sibling)
    return found


def fork(replica: Replica, parent: Sequence, child: Sequence) -> int:
    """Give ``child`` a slot, and the blocks of the prompt that ``parent`` computes; returns the slot."""
    length = child.prompt_len
    replica.kv.share(parent, child, length)
    child.cached_tokens = parent.cached_tokens
    num_whole = length // replica.kv.block_size
    return replica.slots.enter(child, length, num_whole * replica.kv.block_size)


def _common(a: Sequence, b: Sequence) -> int:
    """Tokens with which both begin."""
    length = min(len(a.tokens), len(b.tokens))
    differs = a.tokens[:length] != b.tokens[:length]
    return int(differs.argmax()) if differs.any() else length


def _is_fresh(sequence: Sequence) -> bool:
    """Whether its known tokens are the prompt alone."""
    return len(sequence.tokens) == sequence.prompt_len


def _computes_prompt(sequence: Sequence) -> bool:
    """Whether it runs, on whatever replica, or will once its load is complete, and its first token is not settled."""
    runs = sequence.slot is not None and sequence.exit is None
    return (runs or sequence.load is not None) and sequence.first_token_at is None


def _may_fork(sequence: Sequence) -> bool:
    is_waiting = sequence.slot is None and sequence.finish_reason is None and not sequence.resting
    return is_waiting and _is_fresh(sequence) and not sequence.scoring
