"""``fair``: deficit round robin over tokens, among tenants.

Tokens cannot be foretold, so they are paid for when they are computed (surplus round robin, Adiseshu, Parulkar and
Varghese, 1996; with tokens as in the virtual token counter of Sheng et al., 2024): in each round a tenant may start
requests until it has spent its ``QUANTUM``, and what it spends beyond comes off its next rounds. It pays for each
prompt token that is not cached when a request starts, and for each output token when it is settled, so that what runs
counts against what waits. That its requests were preempted costs it nothing.

With ``spent`` as the sum, a tenant's next round is number ``spent // QUANTUM``: rounds in which nobody could start
anything are skipped, and each operation is a binary search. A tenant that comes, or comes back, joins the current round
at its end, with its debts but without credit. When nobody waits all debts are off. Two things follow:

- Before the first request of a quiet tenant starts, each other tenant starts requests of less than a quantum, and one
  more, however many it has waiting.
- Of two tenants that have something waiting all the time, one is never ahead of the other by a quantum, one prompt and
  what its running requests may still write: when it last started one, its round was no later than the other's.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from core_engine.request import Sequence
from core_engine.waiting_queue import AGEING_S, WaitingQueue, arrival

QUANTUM = 512
"""Tokens of a tenant in a round."""
FEW = 64
"""Tenants that are never worth a look for those that may be forgotten."""


class _Tenant:
    __slots__ = ("place", "spent", "waiting")

    def __init__(self, spent: int) -> None:
        self.spent = spent
        self.place = 0
        """Within a round."""
        self.waiting: list[Sequence] = []
        """By arrival."""


class FairShare(WaitingQueue):
    """Within a tenant first come, first served."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        super().__init__(ageing_s)
        self._tenants: dict[str, _Tenant] = {}
        """Those with sequences that wait, and those with debts."""
        self._ring: list[_Tenant] = []
        """Those with sequences that wait, by their next round and their place in it."""
        self._places = itertools.count()
        self._length = 0
        self._most = FEW

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """As if nothing were cached and nobody got a token meanwhile."""
        ahead: list[tuple[int, int, int, int, _Tenant]] = []
        ring, turn = self._ring, 0
        while turn < len(ring) or ahead:
            if ahead and (turn == len(ring) or ahead[0][:2] < _turn(ring[turn])):
                _, place, spent, index, tenant = heapq.heappop(ahead)
            else:
                tenant = ring[turn]
                turn, place, spent, index = turn + 1, tenant.place, tenant.spent, 0
            sequence = tenant.waiting[index]
            yield sequence
            if index + 1 < len(tenant.waiting):
                spent += _price(sequence, 0)
                heapq.heappush(ahead, (spent // QUANTUM, place, spent, index + 1, tenant))

    def push(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = _Tenant(self._now)
        if not tenant.waiting:
            tenant.spent = max(tenant.spent, self._now)
            tenant.place = next(self._places)
            bisect.insort(self._ring, tenant, key=_turn)
        bisect.insort(tenant.waiting, sequence, key=arrival)
        self._length += 1
        self.num_prompt_tokens += sequence.prompt_len

    def remove(self, sequence: Sequence) -> None:
        self._take(sequence, 0)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        self._take(sequence, _price(sequence, num_cached))

    def served(self, sequences: SequenceOf[Sequence]) -> None:
        if not self._length:
            return
        for name, count in Counter([sequence.request.tenant for sequence in sequences]).items():
            tenant = self._tenants.get(name)
            if tenant is None:
                tenant = self._tenants[name] = _Tenant(self._now)
            self._pay(tenant, count)

    def rank(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.arrival

    @property
    def _now(self) -> int:
        """Where the current round begins."""
        return self._ring[0].spent // QUANTUM * QUANTUM if self._ring else 0

    def _take(self, sequence: Sequence, price: int) -> None:
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            raise KeyError(sequence)
        del tenant.waiting[self._find(tenant.waiting, sequence, arrival)]
        self._length -= 1
        self.num_prompt_tokens -= sequence.prompt_len
        if not self._length:
            self._tenants.clear()
            self._ring.clear()
            self._most = FEW
        elif tenant.waiting:
            self._pay(tenant, price)
        else:
            del self._ring[bisect.bisect_left(self._ring, _turn(tenant), key=_turn)]
            tenant.spent += price

    def _pay(self, tenant: _Tenant, price: int) -> None:
        old, spent = tenant.spent // QUANTUM, tenant.spent + price
        if tenant.waiting and spent // QUANTUM != old:
            del self._ring[bisect.bisect_left(self._ring, _turn(tenant), key=_turn)]
            tenant.spent = spent
            bisect.insort(self._ring, tenant, key=_turn)
        else:
            tenant.spent = spent

    def _forget_idle(self) -> None:
        """Drop tenants that have neither sequences that wait nor debts, now and then."""
        if len(self._tenants) >= self._most:
            now = self._now
            self._tenants = {name: each for name, each in self._tenants.items() if each.waiting or each.spent > now}
            self._most = max(FEW, 2 * len(self._tenants))


def _turn(tenant: _Tenant) -> tuple[int, int]:
    return tenant.spent // QUANTUM, tenant.place


def _price(sequence: Sequence, num_cached: int) -> int:
    """Tokens that a tenant pays when the sequence starts."""
    return 0 if sequence.num_preemptions else len(sequence.tokens) - num_cached
