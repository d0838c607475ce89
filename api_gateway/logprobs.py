"""Log-probabilities as answers show them: the objects of completions, of chat, and vLLM's lists for prompts.

What comes is records (``shared.logprobs``), one for each token row. Text records hold the bytes of each token; a token
may be a part of a character, or have no text at all.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from api_gateway.parameters import Shown
from api_gateway.request_log import TextOffset
from shared.logprobs import Logprobs, TokenLogprob, unpack_text
from shared.messages import PromptInfo

LOWEST = -9999.0
"""Stands for minus infinity and all below, which JSON does not have; vLLM's number."""


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


class LogprobsOfChoice(Protocol):
    """The log-probabilities of one choice, taken piece by piece."""

    def add(self, records: Sequence[bytes]) -> None:
        """Token rows."""

    def take(self) -> dict[str, Any] | None:
        """What was added since the last call, as the ``logprobs`` of a choice; None: nothing."""

    @property
    def offset(self) -> TextOffset | None:
        """Where the next token begins; None: these do not tell."""

    def resume(self, offset: TextOffset | None) -> None:
        """All before the token that begins there was shown, an echoed prompt too. Called before the first ``add``."""


class CompletionLogprobs:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, lists with an entry for each token.

    Each entry of ``top_logprobs`` maps the ``top`` most probable tokens, and the token itself in any case. Offsets
    count characters of the choice's text; one that lies within a character is that character's. Stop strings may have
    cut the text: then the last offsets lie beyond it.

    Args:
        top: how many of the most probable tokens.
        tokens_as_ids: tokens are named ``token_id:N``.
        echoed: the prompt, if it comes before all else.
    """

    def __init__(self, top: int, *, tokens_as_ids: bool, echoed: PromptInfo | None) -> None:
        self._top = top
        self._as_ids = tokens_as_ids
        self._clear()
        self._offsets = _Offsets(0)
        if echoed is not None:
            self._add_prompt(echoed)

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._places: list[int] = []

    def _add_prompt(self, info: PromptInfo) -> None:
        """The first token has no log-probability: nothing comes before it."""
        first = TokenLogprob(int(np.frombuffer(info.ids, np.int32, 1)[0]), LOWEST, info.first)
        self._add(first, self._name(first), None, None)
        self.add(info.records)
        # The text may lack what the first tokens say: a special token, a space.
        hidden = max(0, self._offsets.characters - len(info.text))
        self._places = [max(0, place - hidden) for place in self._places]
        self._offsets = _Offsets(len(info.text))

    def add(self, records: Sequence[bytes]) -> None:
        for record in records:
            self._add_entry(unpack_text(record))

    def take(self) -> dict[str, Any] | None:
        if not self._tokens:
            return None
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._places,
        }
        self._clear()
        return taken

    @property
    def offset(self) -> TextOffset:
        return self._offsets.offset

    def resume(self, offset: TextOffset | None) -> None:
        self._clear()
        if offset is not None:
            self._offsets = _Offsets(*offset)

    def _add_entry(self, entry: Logprobs) -> None:
        token, logprob = entry.token, finite(entry.token.logprob)
        name = self._name(token)
        top: dict[str, float] = {}
        for other in entry.top[: self._top]:
            # Two ids may have one text: the more probable one stands, but never for the token itself.
            top.setdefault(name if other.token_id == token.token_id else self._name(other), finite(other.logprob))
        self._add(token, name, logprob, top | {name: logprob})

    def _add(self, token: TokenLogprob, name: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._places.append(self._offsets.next(token.text or b""))
        self._tokens.append(name)
        self._values.append(logprob)
        self._tops.append(top)

    def _name(self, token: TokenLogprob) -> str:
        """OpenAI's spelling: the text, or ``bytes:\\xe2\\x82`` for what is not whole characters."""
        if self._as_ids:
            return _id_name(token)
        text = token.text or b""
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


class ChatLogprobs:
    """``{content: [{token, logprob, bytes, top_logprobs: [...]}], refusal}``; a chat is not echoed."""

    def __init__(self, top: int, *, tokens_as_ids: bool) -> None:
        self._top = top
        self._as_ids = tokens_as_ids
        self._content: list[dict[str, Any]] = []

    def add(self, records: Sequence[bytes]) -> None:
        for record in records:
            entry = unpack_text(record)
            top = [self._token(other) for other in entry.top[: self._top]]
            self._content.append(self._token(entry.token) | {"top_logprobs": top})

    def take(self) -> dict[str, Any] | None:
        if not self._content:
            return None
        content, self._content = self._content, []
        return {"content": content, "refusal": None}

    @property
    def offset(self) -> None:
        """Nothing in a chat's objects depends on those before."""

    def resume(self, offset: TextOffset | None) -> None: ...

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": _id_name(token) if self._as_ids else _readable(token),
            "logprob": finite(token.logprob),
            "bytes": None if token.text is None else list(token.text),
        }


def prompt_logprobs(info: PromptInfo, top: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token, then ``{id: {logprob, rank, decoded_token}}``."""
    return [None, *(_by_id(unpack_text(record), top) for record in info.records)]


def mean_logprob(records: Sequence[bytes]) -> float:
    """The log-probability per token; 0 without tokens."""
    values = [finite(unpack_text(record).token.logprob) for record in records]
    return sum(values) / len(values) if values else 0.0


def logprobs_of_choice(*, chat: bool, shown: Shown, echoed: PromptInfo | None) -> LogprobsOfChoice | None:
    """What makes the ``logprobs`` of a choice; None: they were not asked for."""
    if shown.logprobs is None:
        return None
    if chat:
        return ChatLogprobs(shown.logprobs, tokens_as_ids=shown.tokens_as_ids)
    return CompletionLogprobs(shown.logprobs, tokens_as_ids=shown.tokens_as_ids, echoed=echoed)


class _Offsets:
    """Where tokens begin, in characters."""

    def __init__(self, start: int, begun: bytes = b"") -> None:
        self.characters = start
        """Whole characters so far."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.setstate((begun, 0))

    @property
    def offset(self) -> TextOffset:
        return TextOffset(self.characters, self._decoder.getstate()[0])

    def next(self, token: bytes) -> int:
        begin = self.characters
        self.characters += len(self._decoder.decode(token))
        return begin


def _by_id(entry: Logprobs, top: int) -> dict[str, Any]:
    ranked = [(entry.rank, entry.token), *enumerate(entry.top[:top], start=1)]
    made: dict[str, Any] = {}
    for rank, token in ranked:
        value = {"logprob": finite(token.logprob), "rank": rank, "decoded_token": _readable(token)}
        made.setdefault(str(token.token_id), value)
    return made


def _readable(token: TokenLogprob) -> str:
    return (token.text or b"").decode(errors="replace")


def _id_name(token: TokenLogprob) -> str:
    return f"token_id:{token.token_id}"
