"""The choice rule of beam search: that of transformers' ``generate(num_beams=...)`` without sampling (5.x).

In each step the continuations of all beams are ordered by their cumulative log-probability. Those among the first
``width`` that end (a stop token, or the length) become finished hypotheses, of which the best ``width`` are kept; the
first ``width`` of those that do not end are the next beams. A hypothesis of L generated tokens scores
``logprob / L ** length_penalty``.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

Parent = TypeVar("Parent")


class Continuation(NamedTuple, Generic[Parent]):
    """A beam and one more token."""

    logprob: float
    """Cumulative, of the generated tokens."""
    parent: Parent
    token: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hypothesis(Generic[Parent]):
    """A continuation that has ended."""

    score: float
    last: Continuation[Parent]
    stopped: bool
    """By a stop token, which is its last; else by the length."""


class BeamScores(Generic[Parent]):
    """What is finished, and which beams go on.

    Args:
        width: beams, and hypotheses at most.
        early_stopping: True: done with ``width`` hypotheses; False: done when, besides, no beam of its present length
            scores better than the worst of them; "never": the same, at the length at which it would score best.
        most_tokens: generated tokens at which every hypothesis ends.
        min_tokens: generated tokens before which no stop token is chosen.
    """

    def __init__(
        self,
        width: int,
        stop_ids: frozenset[int],
        *,
        length_penalty: float,
        early_stopping: bool | str,
        most_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        self.width = width
        self.stop_ids = stop_ids
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.most_tokens = most_tokens
        self.min_tokens = min_tokens
        self.finished: list[Hypothesis[Parent]] = []
        """Best first; of equal ones the one that ended first."""

    def advance(
        self, beams: Sequence[tuple[Parent, float, Iterable[tuple[int, float]]]], length: int
    ) -> list[Continuation[Parent]]:
        """One step; returns the beams that go on, best first, or none: the search is done.

        Of equal continuations that of the first beam comes first, then the one whose token comes first.

        Args:
            beams: of each its cumulative log-probability, and the most probable tokens with theirs, best first: at
                least ``width`` of them beside the stop tokens.
            length: generated tokens of the continuations.
        """
        bars = self.stop_ids if length <= self.min_tokens else frozenset[int]()
        found = [
            Continuation(before + logprob, parent, token)
            for parent, before, tokens in beams
            for token, logprob in tokens
            if token not in bars
        ]
        found.sort(key=lambda each: -each.logprob)
        is_last = length >= self.most_tokens
        for each in found[: self.width]:
            if is_last or each.token in self.stop_ids:
                self._finish(each, length)
        going = [] if is_last else [each for each in found if each.token not in self.stop_ids][: self.width]
        return [] if not going or self._is_done(going[0].logprob, length) else going

    def score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self.length_penalty)

    def _finish(self, last: Continuation[Parent], length: int) -> None:
        hypothesis = Hypothesis(self.score(last.logprob, length), last, last.token in self.stop_ids)
        bisect.insort(self.finished, hypothesis, key=lambda each: -each.score)
        del self.finished[self.width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether no beam, of which the best has the log-probability ``best``, needs to go on."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        at_the_end = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.score(best, self.most_tokens if at_the_end else length) <= self.finished[-1].score
