"""Requests that may be what a worker dies of. They run alone, so that nobody else pays for it.

A request that was aboard ``STRIKES`` losses of a worker in a row without getting on is a *suspect*. One suspect at a
time has its *turn*: one replica takes back all others (they wait again, and go on from its prefix cache or elsewhere)
and computes nothing but the suspect's choices. The turn is over when each of these got on by ``CLEAR_TOKENS`` tokens or
ended, which clears the suspect, or when nobody waits for it any more. Only losses in a turn convict, and ``CONVICT`` of
them: the first may be bad luck. Who was lost with fewest turns is next, so that the innocent go on first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from core_engine.metrics import EngineMetrics
from core_engine.replica import Replica
from core_engine.request import Exit, Request, Sequence

STRIKES = 2
"""Losses in a row that make a suspect."""
CONVICT = 3
"""Losses in a row of its own turns that convict."""
CLEAR_TOKENS = 3
"""A choice that got on by this many tokens since the last loss did not cause it."""


class Suspects:
    """Who is suspected, and whose turn it is on which replica.

    ``Replica.reserved_for`` tells the others about a turn. While ``requests`` is empty, ``update`` and ``admissible``
    need not be called.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self.requests: dict[Request, None] = {}
        """The suspects."""
        self._metrics = metrics
        self._replica: Replica | None = None

    @property
    def turn(self) -> Request | None:
        """Who runs alone now."""
        return None if self._replica is None else self._replica.reserved_for

    # -- losses ----------------------------------------------------------------------------------------------------

    def struck(self, aboard: Iterable[Sequence], lost: Replica, running: SequenceOf[Replica]) -> Request | None:
        """A replica was lost whose unsettled steps named ``aboard``, sequences that have not ended.

        Args:
            lost: evacuated.
            running: the other replicas, which may run further choices of the same requests.

        Returns:
            Who is convicted by that; yours to end.
        """
        reserved = lost.reserved_for
        by_request: dict[Request, list[Sequence]] = {}
        for sequence in aboard:
            by_request.setdefault(sequence.request, []).append(sequence)
        for request, sequences in by_request.items():
            got_on = all(_got_on(sequence, lost) for sequence in sequences)
            request.strikes = 1 if got_on else request.strikes + 1
            request.strikes_alone = 0 if got_on else request.strikes_alone + (request is reserved)
            _mark(request, sequences, running)
            if request.strikes >= STRIKES and request not in self.requests:
                self.requests[request] = None
                for replica in running:
                    _take_back(replica, [s for s in replica.aboard() if s.request is request])
        if lost is self._replica:
            self._replica = None
        self._count()
        if reserved is not None and reserved in by_request and reserved.strikes_alone >= CONVICT:
            self._metrics.convicted.inc()
            return reserved
        return None

    def forget(self, request: Request) -> None:
        """A request has ended, or nobody suspects it any more."""
        if request in self.requests:
            del self.requests[request]
            self._count()
            if self.turn is request:
                self._end_turn()

    # -- turns -----------------------------------------------------------------------------------------------------

    def update(self, replicas: SequenceOf[Replica]) -> None:
        """Clear whose turn was good, and begin the next; before any replica plans."""
        turn = self.turn
        if turn is not None:
            assert self._replica is not None
            if all(_got_on(sequence, self._replica) for sequence in _live(turn)):
                turn.strikes = turn.strikes_alone = 0
                self.forget(turn)
            elif not _wants_turn(turn) or (self._replica.leaving and not _is_aboard(turn, self._replica)):
                self._end_turn()
        if self._replica is None:
            self._begin_turn(replicas)

    def _begin_turn(self, replicas: SequenceOf[Replica]) -> None:
        """On the replica that runs least of those with enough memory; of these the youngest."""
        candidates = [request for request in self.requests if _wants_turn(request)]
        for turn in sorted(candidates, key=lambda request: (request.strikes_alone, request.order)):
            open_ = [replica for replica in reversed(replicas) if not replica.leaving and _fits(turn, replica)]
            if open_:
                break
        else:
            return
        self._replica = min(open_, key=lambda replica: replica.num_running)
        self._replica.reserved_for = turn
        _mark(turn, _live(turn), replicas)
        _take_back(self._replica, [s for s in self._replica.aboard() if s.request is not turn])

    def _end_turn(self) -> None:
        assert self._replica is not None
        self._replica.reserved_for = None
        self._replica = None

    def admissible(self, replica: Replica, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those of ``waiting`` that a replica may admit, in order; in a turn only once it is empty of all others."""
        turn = replica.reserved_for
        if turn is None:
            return (sequence for sequence in waiting if sequence.request not in self.requests)
        if any(sequence.request is not turn for sequence in replica.slots.occupied()):
            return iter(())
        return (sequence for sequence in waiting if sequence.request is turn)

    def _count(self) -> None:
        self._metrics.suspects.set(len(self.requests))


def _live(request: Request) -> list[Sequence]:
    """The sequences of a request that get on."""
    if request.search is not None:
        return request.search.live
    return [sequence for sequence in request.sequences if sequence.finish_reason is None]


def _wants_turn(request: Request) -> bool:
    """Whether anybody waits for a choice of the request."""
    return any(sequence.finish_reason is None and not sequence.resting for sequence in request.sequences)


def _length(sequence: Sequence, replicas: Iterable[Replica]) -> int:
    """Settled tokens."""
    replica = next((replica for replica in replicas if sequence in replica), None)
    return len(sequence.tokens) if replica is None else int(replica.slots.num_tokens[sequence.slot])


def _mark(request: Request, aboard: Iterable[Sequence], replicas: SequenceOf[Replica]) -> None:
    """Remember how far it got. A search begins again each time, and has to get on from where it got at best."""
    if request.search is not None:
        request.search.struck_at = max([request.search.struck_at, *(_length(each, replicas) for each in aboard)])
        return
    for sequence in _live(request):
        sequence.struck_at = _length(sequence, replicas)


def _got_on(sequence: Sequence, replica: Replica) -> bool:
    search = sequence.request.search
    struck_at = sequence.struck_at if search is None else search.struck_at
    return _length(sequence, (replica,)) >= struck_at + CLEAR_TOKENS


def _fits(request: Request, replica: Replica) -> bool:
    """Whether it could run to its end there."""
    return all(each.limit <= replica.kv.capacity and replica.may_hold(each) for each in _live(request))


def _is_aboard(request: Request, replica: Replica) -> bool:
    return any(sequence.request is request for sequence in replica.aboard())


def _take_back(replica: Replica, sequences: Iterable[Sequence]) -> None:
    """Let sequences of a replica wait again."""
    for sequence in sequences:
        replica.request_exit(sequence, Exit.PREEMPT)
