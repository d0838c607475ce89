"""A request at one process: its logs, and its state towards the parent above and the child below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.hop.log import Log, digest
from shared.messages import Attempt, Known, TextSpec, TokenSpec

if TYPE_CHECKING:
    from shared.hop.children import ChildLink

NOTHING_KNOWN = Known(0, digest(()))
NO_ATTEMPT = Attempt(0, 0, 0)


class Source(NamedTuple):
    """A process: its name on the link, and which life of it."""

    peer: str
    boot: int


class Upper:
    """Towards the parent (at a tokenizer and an engine)."""

    __slots__ = ("accepted", "attempt", "base", "handle", "orphan", "owner", "renewed", "started", "suspect")

    def __init__(self, owner: Source, attempt: Attempt, handle: int, now: float) -> None:
        self.owner = owner
        """Who submitted it last, and gets its rows."""
        self.attempt = attempt
        self.handle = handle
        self.renewed = now
        self.accepted = False
        """The engine took this attempt."""
        self.started = False
        """``begin`` was called."""
        self.suspect = False
        """It runs alone: it was aboard crashes."""
        self.orphan = False
        """Nobody renews it: it rests until somebody does, or until its lease ends."""
        self.base = 0
        """Rows acknowledged when it was submitted."""


class Lower:
    """Towards the child (at a gateway and a tokenizer)."""

    __slots__ = (
        "accepted",
        "alone",
        "attempt",
        "base",
        "child",
        "confirmed",
        "go",
        "handle",
        "heard",
        "heard_at",
        "resync_at",
        "spec",
        "strikes",
        "suspect",
        "touched",
    )

    def __init__(self, spec: TextSpec | TokenSpec) -> None:
        self.spec = spec
        """What is asked of the child."""
        self.attempt = NO_ATTEMPT
        self.handle = -1
        self.child: ChildLink | None = None
        """Where it is placed; None while there are no children."""
        self.accepted = False
        """A child has told that the engine took it, under any attempt."""
        self.confirmed = False
        """... under this attempt."""
        self.heard = True
        """A delta came since the last beat."""
        self.heard_at = 0.0
        self.resync_at = -1e9
        self.touched: dict[str, int | None] = {}
        """Lives of children that it was aboard: name to boot id."""
        self.strikes = 0
        """Crashes it was aboard."""
        self.alone = 0
        """Crashes it was aboard in quarantine."""
        self.go: Source | None = None
        """The life of a child in which it runs in quarantine."""
        self.suspect = False
        self.base = 0
        """Rows held when it was placed."""


class Request:
    """``logs`` hold one ``Log`` per choice; ``context`` is the owner's."""

    __slots__ = ("cached_tokens", "context", "known", "logs", "lower", "prompt_tokens", "rid", "spec", "upper")

    def __init__(self, rid: str, spec: TextSpec | TokenSpec) -> None:
        self.rid = rid
        self.spec = spec
        self.logs = [Log(self, choice) for choice in range(spec.params.n)]
        self.known: Sequence[Known] = [NOTHING_KNOWN] * spec.params.n
        """What the client has of each choice, beyond what may be in the logs."""
        self.prompt_tokens = 0
        """Length of the prompt; 0 until the engine has accepted."""
        self.cached_tokens = 0
        """Tokens of the prompt that the prefix cache held when the engine first scheduled it; 0 until it has."""
        self.context: Any = None
        self.upper: Upper | None = None
        self.lower: Lower | None = None

    @property
    def n(self) -> int:
        return len(self.logs)

    @property
    def size(self) -> int:
        """Rows of all choices."""
        return sum(log.rows for log in self.logs)

    @property
    def failed(self) -> bool:
        return any(log.failed for log in self.logs)

    @property
    def over(self) -> bool:
        """Every choice has ended, or one has failed."""
        return all(log.end is not None for log in self.logs) or self.failed

    def __repr__(self) -> str:
        return f"Request({self.rid!r}, {self.logs})"


def upper_of(request: Request) -> Upper:
    """The state of a request that was submitted here."""
    assert request.upper is not None
    return request.upper


def lower_of(request: Request) -> Lower:
    """The state of a request that is placed below."""
    assert request.lower is not None
    return request.lower
