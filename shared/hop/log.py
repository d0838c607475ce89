"""The append-only log of one choice: one row per token, then one END row."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shared.messages import End, FinishReason, Known, PromptInfo

if TYPE_CHECKING:
    from shared.hop.outbox import Outbox
    from shared.hop.request import Request

DIGEST_BYTES = 16


def digest(ids: Iterable[int]) -> bytes:
    """blake2b (16 bytes) over token ids as little-endian int32."""
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class Log:
    """One choice of one request, at one process.

    ``ids`` and ``pieces`` may be read by anybody; they grow through ``Child.append`` or the deltas that a ``Parent``
    takes. A log that a re-submission replaces is dead (``live`` False): results still on their way belong to it and
    reach nobody.
    """

    __slots__ = (
        "_hash",
        "_hashed",
        "acked",
        "choice",
        "context",
        "dirty",
        "end",
        "handle",
        "ids",
        "last_piece",
        "live",
        "outbox",
        "pieces",
        "prompt",
        "recorded",
        "records",
        "request",
        "sent",
    )

    def __init__(self, request: Request, choice: int, ids: Iterable[int] = (), end: End | None = None) -> None:
        self.request = request
        self.choice = choice
        self.ids = array("i", ids)
        """Token ids, int32."""
        self.end = end
        """The END row, once there is one."""
        self.pieces: list[str] = []
        """At a tokenizer and a gateway: the text that each token row releases."""
        self.last_piece = ""
        """The text that the END row releases."""
        self.recorded = request.spec.params.logprobs is not None
        """Whether the request asked for log-probabilities."""
        self.records: list[bytes] = [b""] * len(self.ids) if self.recorded else []
        """If so, the record of each token row (``shared.logprobs``); b"": the row was given, and who gave it has it."""
        self.prompt: PromptInfo | None = None
        """What goes with the first row: it is sent, and taken, with row 0 only."""
        self.context: Any = None
        """The owner's: a sequence, a detokenizer, a stream."""
        self.live = True
        # The child side: rows sent up and acknowledged from above, and where they go.
        self.sent = 0
        self.acked = 0
        self.dirty = False
        self.handle = -1
        self.outbox: Outbox | None = None
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._hashed = 0

    @property
    def rows(self) -> int:
        """How many rows there are, the END row included."""
        return len(self.ids) + (self.end is not None)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, which ends the whole request."""
        return self.end is not None and self.end.reason is FinishReason.ERROR

    def grow(self, ids: Sequence[int], records: Sequence[bytes] = ()) -> None:
        """Add token rows; where log-probabilities were asked for, a row without a record gets an empty one."""
        self.ids.extend(ids)
        if self.recorded:
            self.records.extend(records)
            self.records.extend([b""] * (len(self.ids) - len(self.records)))

    def digest_at(self, count: int) -> bytes:
        """Digest of the first ``count`` ids. Asking for growing counts costs only the new ids each time."""
        if count < self._hashed:
            return digest(self.ids[:count])
        self._hash.update(self.ids[self._hashed : count].tobytes())
        self._hashed = count
        return self._hash.digest()

    def known(self) -> Known:
        """What somebody who holds exactly these ids knows."""
        return Known(len(self.ids), self.digest_at(len(self.ids)))

    def has(self, known: Known) -> bool:
        """Whether this log begins with the ids that ``known`` stands for."""
        return len(self.ids) >= known.count and self.digest_at(known.count) == known.digest

    def lacks_records(self, first: int) -> bool:
        """Whether token rows from ``first`` on were given, so that nobody but who gave them has their records."""
        return b"" in self.records[first:]

    def cut(self, tokens: int, end: End, last_piece: str = "") -> None:
        """Keep the first ``tokens`` token rows and end there (a stop string). Only rows that nobody was sent may go.

        ``end.prompt_tokens`` and ``end.cached_tokens`` are filled in when they are known here.
        """
        if tokens < len(self.ids):
            del self.ids[tokens:]
            del self.pieces[tokens:]
            del self.records[tokens:]
            if self._hashed > tokens:
                self._hash, self._hashed = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        prompt_tokens = end.prompt_tokens or self.request.prompt_tokens
        cached_tokens = end.cached_tokens or self.request.cached_tokens
        if (prompt_tokens, cached_tokens) != (end.prompt_tokens, end.cached_tokens):
            end = dataclasses.replace(end, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        self.end, self.last_piece = end, last_piece

    def __repr__(self) -> str:
        return f"Log({self.request.rid!r}, {self.choice}, {len(self.ids)} ids, end={self.end})"
