"""Stop strings: found wherever they begin, in or across tokens, and never shown in part."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A stop string was found."""

    stop: str
    text: str
    """What is released before the end; with ``include``, up to and with the stop string."""


class StopStrings:
    """Searches a growing text and holds back only a tail that may become a stop string.

    The stop string that is complete first wins, of two that end together the longer: so the result does not depend on
    how the text was cut into pieces. Text that was pushed with ``search`` false neither contains nor begins a match.
    """

    __slots__ = ("_begins", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """At least one stop string, and none is empty; ``include``: a match is released, too."""
        self._stops = list(stops)
        self._include = include
        self._longest = max(map(len, stops))
        self._begins = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]").search
        self._held = ""

    def push(self, text: str, search: bool = True) -> str | Match:
        """Add ``text``; returns what may be released now, or the match that ends everything."""
        if not search:
            released, self._held = self._held + text, ""
            return released
        if not self._held and self._begins(text) is None:
            return text
        text = self._held + text
        best = self._earliest(text)
        if best is not None:
            start, stop = best
            self._held = ""
            return Match(stop, text[: start + len(stop)] if self._include else text[:start])
        keep = self._live_tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held: it did not become a stop string."""
        released, self._held = self._held, ""
        return released

    def _earliest(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _live_tail(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a proper prefix of a stop string."""
        position = max(len(text) - self._longest + 1, 0)
        while (begin := self._begins(text, position)) is not None:
            position = begin.start()
            tail = text[position:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(tail)
            position += 1
        return 0
