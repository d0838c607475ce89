"""What a child has to tell one parent: Held rows, and one delta message for all rows that are new.

A row goes out as part of a range from the first row not yet sent. When a send fails the range stays, and a later one
covers it: a slow reader gets merged ranges, and no queue grows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from shared.hop.log import Log
from shared.hop.request import Request
from shared.messages import End, Held, Int32, Message, PromptInfo, TextDelta, TokenDelta

MAX_TOKENS = 65_536
"""Token rows in one delta message, give or take those of one step."""
MAX_EXTRA_BYTES = 8 * 1024 * 1024
"""Log-probability records in one delta message, give or take those of one log."""

Send: TypeAlias = Callable[[str, Message], bool]
"""``send(peer, message)``: False when it cannot go out now."""


class Batch:
    """The unsent ranges of some logs, counted as sent until ``restore``."""

    __slots__ = ("ends", "extra_bytes", "logs", "rows", "tokens")

    def __init__(self) -> None:
        self.extra_bytes = 0
        self.logs: list[Log] = []
        self.rows: list[int] = []
        """Four numbers for each log: handle, choice, start, token rows."""
        self.tokens: list[int] = []
        self.ends: list[tuple[int, Log]] = []
        """(index, log) of those whose END row is due."""

    def fill(self, outbox: Outbox) -> int:
        """Take what is unsent of the outbox's dirty logs; returns how many of them are done with."""
        logs, rows, tokens = self.logs, self.rows, self.tokens
        for position, log in enumerate(outbox.dirty):
            if log.outbox is not outbox:  # it was replaced, dropped, or submitted again by another parent
                continue
            ids, start = log.ids, log.sent
            count = len(ids) - start
            if count == 1 and log.end is None:
                tokens.append(ids[start])
                log.sent = start + 1
            elif count > 0 or (count == 0 and log.end is not None):
                room = MAX_TOKENS - len(tokens)
                if count > room:
                    self._take_part(log, start, room)
                    return position
                tokens += ids[start:]
                if log.end is not None:
                    self.ends.append((len(logs), log))
                log.sent = log.rows
            else:
                log.dirty = False
                continue
            log.dirty = False
            rows += (log.handle, log.choice, start, count)
            logs.append(log)
            if log.recorded or log.prompt is not None:
                self.extra_bytes += _extra_bytes(log, start)
                if self.extra_bytes > MAX_EXTRA_BYTES:
                    return position + 1
        return len(outbox.dirty)

    def _take_part(self, log: Log, start: int, count: int) -> None:
        """The first rows of a range that does not fit; the log stays dirty."""
        if count > 0:
            self.tokens += log.ids[start : start + count]
            self.rows += (log.handle, log.choice, start, count)
            self.logs.append(log)
            log.sent = start + count

    def restore(self) -> None:
        """Count nothing of it as sent."""
        for log, start in zip(self.logs, self.rows[2::4], strict=True):
            log.sent, log.dirty = start, True

    def logprobs(self) -> list[tuple[int, list[bytes]]]:
        """The records of the rows, where they were asked for."""
        return [
            (index, log.records[start : start + count])
            for index, (log, start, count) in enumerate(self._ranges())
            if log.records and count
        ]

    def prompts(self) -> list[tuple[int, PromptInfo]]:
        """What goes with first rows."""
        return [
            (index, log.prompt)
            for index, (log, start, _) in enumerate(self._ranges())
            if start == 0 and log.prompt is not None
        ]

    def pieces(self) -> list[str]:
        """The text of each token row."""
        pieces: list[str] = []
        for log, start, count in self._ranges():
            pieces.extend(log.pieces[start : start + count])
        return pieces

    def _ranges(self) -> Iterable[tuple[Log, int, int]]:
        """Each log, its first row, and how many token rows."""
        return zip(self.logs, self.rows[2::4], self.rows[3::4], strict=True)

    def arrays(self) -> tuple[Int32, Int32]:
        """``rows`` [k, 4] and ``tokens`` of a delta."""
        return _int32(self.rows).reshape(-1, 4), _int32(self.tokens)


def _extra_bytes(log: Log, start: int) -> int:
    """Size of what goes with the rows from ``start`` on, beside ids and text."""
    size = sum(map(len, log.records[start:]))
    if start == 0 and log.prompt is not None:
        size += sum(map(len, log.prompt.records)) + len(log.prompt.ids) + len(log.prompt.text)
    return size


def _int32(values: list[int]) -> Int32:
    """Twice as fast as ``np.array`` for a list."""
    return np.frombuffer(struct.pack(f"<{len(values)}i", *values), "<i4")


MakeDelta: TypeAlias = Callable[[Batch], Message]


def token_delta(batch: Batch) -> TokenDelta:
    """The delta of an engine."""
    ends: list[tuple[int, End]] = [(index, log.end) for index, log in batch.ends if log.end is not None]
    return TokenDelta(*batch.arrays(), ends, batch.logprobs(), batch.prompts())


def text_delta(batch: Batch) -> TextDelta:
    """The delta of a tokenizer: every token row has its piece."""
    ends = [(index, log.end, log.last_piece) for index, log in batch.ends if log.end is not None]
    return TextDelta(*batch.arrays(), batch.pieces(), ends, batch.logprobs(), batch.prompts())


class Outbox:
    """One parent as its child sees it."""

    __slots__ = ("blocked_until", "dirty", "handles", "held", "peer")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.handles: dict[int, Request] = {}
        """Its live handles."""
        self.dirty: list[Log] = []
        """Logs that may have unsent rows."""
        self.held: dict[int, Request] = {}
        """Handles that are owed a Held row."""
        self.blocked_until = 0.0

    def flush(self, send: Send, make_delta: MakeDelta) -> bool:
        """Send all that is due; False: the peer takes no more now."""
        # Held first: a parent that sees rows has heard of their acceptance.
        if self.held and not self._flush_held(send):
            return False
        while self.dirty:
            batch = Batch()
            done = batch.fill(self)
            if batch.logs and not send(self.peer, make_delta(batch)):
                batch.restore()
                return False
            del self.dirty[:done]
        return True

    def _flush_held(self, send: Send) -> bool:
        rows = []
        for handle, request in self.held.items():
            if self.handles.get(handle) is request:
                accepted = request.upper is not None and request.upper.accepted
                rows.append((handle, accepted, request.prompt_tokens if accepted else 0, request.cached_tokens))
        if rows and not send(self.peer, Held(np.array(rows, np.int32))):
            return False
        self.held.clear()
        return True

    @property
    def idle(self) -> bool:
        return not (self.handles or self.dirty or self.held)
