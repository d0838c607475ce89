"""What the gateway holds of a request, from which everything else can be computed again.

The rows themselves (every token id received, the text that each releases, the END row) are the hop's ``Log``; here is
how much of them the client was given.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from shared.hop import Log, Request, digest
from shared.messages import End, FinishReason, Known, PromptInfo

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class TextOffset(NamedTuple):
    """Where the next token of a choice begins, by what the tokens before it stand for."""

    characters: int
    """Whole ones before it, an echoed prompt included."""
    begun: bytes
    """The first bytes of a character whose last ones are still to come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How much of a choice a client has."""

    tokens: int = 0
    """Token rows."""
    digest: bytes = digest(())
    """Over their ids."""
    begun: bool = False
    """It has the first chunk."""
    tail: bool = False
    """It has the text of the END row."""
    ended: bool = False
    """It has the finish chunk."""
    offset: TextOffset | None = None
    """Of its next token, where tokens are shown with their offsets."""

    @property
    def rows(self) -> int:
        return self.tokens + self.tail

    @property
    def known(self) -> Known:
        return Known(self.tokens, self.digest)


class ChoiceLog:
    """One choice of the answer. What was delivered never changes."""

    __slots__ = (
        "_verified",
        "end_sent",
        "ended",
        "first_token_at",
        "index",
        "last_token_at",
        "resumed",
        "rows",
        "sent_chars",
        "sent_rows",
        "timed_rows",
    )

    def __init__(self, rows: Log, index: int) -> None:
        self.rows = rows
        self.index = index
        """Of the choice in the answer."""
        self.sent_rows = 0
        """Rows delivered to the client, the END row included."""
        self.sent_chars = 0
        """Characters delivered to the client."""
        self.ended = False
        """Its END row was counted."""
        self.end_sent = False
        self.timed_rows = 0
        """Token rows whose arrival was recorded."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        """Monotonic times of the first and of the latest token rows; 0 before the first."""
        self.resumed: Position | None = None
        """Where the client was when it came back for this choice."""
        self._verified = False

    def resume(self, position: Position, now: float) -> None:
        """Go on at a position, which the rows may not have reached yet. ``now`` is monotonic."""
        self.resumed = position
        self.sent_rows = position.rows
        self.end_sent = position.ended
        self.timed_rows = position.tokens
        self.first_token_at = self.last_token_at = now

    def skip(self, end: End) -> None:
        """All of it was delivered, and no row will come."""
        self.rows.end = end
        self.sent_rows = self.rows.rows
        self._verified = True

    @property
    def behind(self) -> bool:
        """The client has rows that are not here yet."""
        return self.rows.rows < self.sent_rows

    @property
    def lost(self) -> bool:
        """What is here cannot continue what the client has: other ids, an earlier end, or a row whose record nobody
        has any more."""
        start, rows = self.resumed, self.rows
        if start is None:
            return False
        if rows.lacks_records(self.sent_rows):
            return True
        if self._verified:
            return False
        if len(rows.ids) < start.tokens:
            return rows.end is not None
        self._verified = True
        return (start.tail and len(rows.ids) > start.tokens) or not rows.has(start.known)

    @property
    def position(self) -> Position:
        """What was delivered, a finish chunk and the offset aside."""
        tokens = min(self.sent_rows, len(self.rows.ids))
        return Position(tokens, self.rows.digest_at(tokens), True, self.sent_rows > tokens)

    def take(self) -> tuple[str, array[int]]:
        """The text and the ids that were not delivered yet; from here on they count as delivered."""
        rows, start = self.rows, self.sent_rows
        tokens = len(rows.ids)
        text = rows.pieces[start] if tokens == start + 1 else "".join(rows.pieces[start:])
        if rows.end is not None and start < rows.rows:
            text += rows.last_piece
        self.sent_rows = rows.rows
        self.sent_chars += len(text)
        return text, rows.ids[start:tokens]

    @property
    def completion_tokens(self) -> int:
        return max(len(self.rows.ids), self.resumed.tokens if self.resumed is not None else 0)

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why it ended; None while it goes on."""
        return None if self.rows.end is None else FINISH_REASONS.get(self.rows.end.reason, "error")

    @property
    def stop_reason(self) -> str | int | None:
        return None if self.rows.end is None else self.rows.end.stop_reason


class PromptLog:
    """One prompt of the answer with its ``n`` choices: one request of the hop."""

    __slots__ = ("choices", "has_tokens", "opened", "request")

    def __init__(self, request: Request, first_index: int) -> None:
        self.request = request
        self.choices = [ChoiceLog(log, first_index + choice) for choice, log in enumerate(request.logs)]
        self.opened = False
        """It was accepted or has rows."""
        self.has_tokens = False

    def resume(self, positions: Sequence[Position], lengths: tuple[int, int], now: float) -> None:
        """Go on with each choice where its client was; if it lacks the last events only, nothing is asked for.

        Args:
            lengths: of the prompt, and of its part that was cached.
        """
        self.has_tokens = True
        for choice, position in zip(self.choices, positions, strict=True):
            choice.resume(position, now)
        if self.request.lower is None:
            self.request.prompt_tokens = lengths[0]
            for choice in self.choices:
                choice.skip(End(FinishReason.STOP, prompt_tokens=lengths[0], cached_tokens=lengths[1]))

    @property
    def info(self) -> PromptInfo | None:
        """What was asked of the prompt; None until it is here. Its records come with the first choice only."""
        scored = self.request.spec.params.prompt_logprobs is not None
        for choice in self.choices:
            info = choice.rows.prompt
            if info is not None and (info.records or not scored or choice is self.choices[0]):
                return info
        return None

    @property
    def prompt_tokens(self) -> int:
        """0 until the engine has accepted."""
        return self.request.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        ends = (choice.rows.end for choice in self.choices)
        return max((end.cached_tokens for end in ends if end is not None), default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer. The prompt of ``n`` choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens from the prefix cache; None until a choice ended."""

    @classmethod
    def of(cls, prompts: Sequence[PromptLog]) -> Usage:
        choices = [choice for prompt in prompts for choice in prompt.choices]
        ended = any(choice.rows.end is not None for choice in choices)
        return cls(
            prompt_tokens=sum(prompt.prompt_tokens for prompt in prompts),
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=sum(prompt.cached_tokens for prompt in prompts) if ended else None,
        )

    def to_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens},
        }
