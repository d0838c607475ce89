"""Calls that the engines answer: one to each of them, one answer to the gateway."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable

from shared.messages import Message, PrefixCacheReset, ResetPrefixCache

MOST_OPEN = 256
"""Calls that wait for an engine. A gateway asks again, so the oldest may be forgotten."""


@dataclasses.dataclass(slots=True)
class _Open:
    peer: str
    call: int
    asked: set[str]
    """Engines that have not answered."""
    num_forgotten: int = 0
    num_held: int = 0
    num_host: int = 0


class EngineCalls:
    """Passes calls on.

    Args:
        send_up: sends a message to a gateway.
        send_down: sends a message to an engine.
        engines: the names of all.
    """

    def __init__(
        self,
        send_up: Callable[[str, Message], bool],
        send_down: Callable[[str, Message], bool],
        engines: Callable[[], Iterable[str]],
    ) -> None:
        self._send_up, self._send_down, self._engines = send_up, send_down, engines
        self._numbers = itertools.count(1)
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def receive(self, peer: str, message: Message) -> bool:
        """Take a call of a gateway; False: it is none for an engine."""
        if not isinstance(message, ResetPrefixCache):
            return False
        names = set(self._engines())
        if names:
            number = next(self._numbers)
            self._open[number] = _Open(peer, message.call, names)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            for name in names:
                self._send_down(name, ResetPrefixCache(number))
        return True

    def on_answer(self, engine: str, answer: PrefixCacheReset) -> None:
        """The last engine's answer makes the gateway's."""
        call = self._open.get(answer.call)
        if call is None or engine not in call.asked:
            return
        call.asked.remove(engine)
        call.num_forgotten += answer.num_forgotten
        call.num_held += answer.num_held
        call.num_host += answer.num_host
        if not call.asked:
            del self._open[answer.call]
            reset = PrefixCacheReset(call.call, call.num_forgotten, call.num_held, num_host=call.num_host)
            self._send_up(call.peer, reset)
