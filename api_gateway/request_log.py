"""What the gateway holds of a request, from which everything else can be computed again.

The rows themselves (every token id received, the text that each releases, the END row) are the hop's ``Log``; here is
how much of them the client was given.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from shared.hop import Log, Request
from shared.messages import FinishReason, PromptInfo

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class ChoiceLog:
    """One choice of the answer. What was delivered never changes."""

    __slots__ = (
        "end_sent",
        "ended",
        "first_token_at",
        "index",
        "last_token_at",
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
        return len(self.rows.ids)

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
