"""The children of a parent: who there is, in which order a request tries them, and what they are owed."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from shared.hop.request import Request
from shared.messages import Abort

EARLIER_LIVES = 16


class ChildLink:
    """One child as its parent sees it. ``name`` is its endpoint."""

    __slots__ = ("aborts", "acks", "blocked_until", "boot", "demands", "earlier", "handles", "name", "usable")

    def __init__(self, name: str) -> None:
        self.name = name
        self.boot: int | None = None
        """Its life, as last heard."""
        self.earlier: deque[int] = deque(maxlen=EARLIER_LIVES)
        """Boot ids of lives that have ended."""
        self.usable = True
        """It said that it can take requests (or has said nothing)."""
        self.handles: dict[int, Request] = {}
        """Live handles of the requests placed there."""
        self.aborts: list[Abort] = []
        """Not sent yet."""
        self.acks = array("i")
        """(handle, choice, have) of acknowledgements that do not wait for the beat."""
        self.demands: dict[Request, None] = {}
        """Requests with a gap: they are acknowledged with ``resync``."""
        self.blocked_until = 0.0

    @property
    def owed(self) -> bool:
        """Whether there is something to tell it that does not wait for the beat."""
        return bool(self.aborts or self.acks or self.demands)


class ChildSet:
    """The children by name. The order for a request is the same at every parent (rendezvous hashing), so that a
    request that is resumed through another parent finds its log."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._links = {name: ChildLink(name) for name in names}

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ChildLink]:
        return iter(self._links.values())

    def get(self, name: str) -> ChildLink | None:
        return self._links.get(name)

    def replace(self, names: Iterable[str]) -> list[ChildLink]:
        """Set who there is; returns those that are gone."""
        wanted = set(names)
        gone = [link for name, link in self._links.items() if name not in wanted]
        for link in gone:
            del self._links[link.name]
        for name in sorted(wanted - self._links.keys()):
            self._links[name] = ChildLink(name)
        return gone

    def order(self, rid: str) -> Sequence[ChildLink]:
        """All children, in the order in which this request tries them: usable ones first."""
        return sorted(self._links.values(), key=lambda link: (not link.usable, _weight(rid, link.name)))


def _weight(rid: str, name: str) -> bytes:
    return hashlib.blake2b(f"{rid}\0{name}".encode(), digest_size=8).digest()
