"""What a parent does with a delta: the rows that are new go to their logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shared.hop.children import ChildLink
from shared.hop.crashes import clear_if_proven
from shared.hop.log import Log
from shared.hop.request import Request
from shared.messages import End, TextDelta, TokenDelta

Growth: TypeAlias = tuple[Log, int]
"""A log, and the offset of its first new row."""


def take_delta(
    child: ChildLink, message: TokenDelta | TextDelta, now: float
) -> tuple[Sequence[Growth], Sequence[Request]]:
    """Add the new rows of a message to their logs.

    A row that names no live handle of this child is a stray of an attempt that is over. It is dropped, never answered
    with Abort, which would end a log kept for a resume.

    Returns:
        The logs that grew, and the requests whose rows begin beyond what is here.
    """
    handles, ids = child.handles, message.tokens.tolist()
    pieces, ends = _text_of(message)
    records, prompts = dict(message.logprobs), dict(message.prompts)
    growths: list[Growth] = []
    gaps: list[Request] = []
    stop = 0
    for index, (handle, choice, offset, count) in enumerate(message.rows.tolist()):
        start, stop = stop, stop + count
        request = handles.get(handle)
        if request is None or choice >= len(request.logs):
            continue
        lower, log = request.lower, request.logs[choice]
        assert lower is not None
        lower.heard_at, lower.heard = now, True
        have = len(log.ids)
        if log.end is not None:
            continue
        if offset > have:
            gaps.append(request)
            continue
        if have == offset == 0 and index in prompts:
            log.prompt = prompts[index]
        start += have - offset  # trim the rows that are here already
        if start < stop:
            log.grow(ids[start:stop], records[index][have - offset : count] if index in records else ())
            if pieces is not None:
                log.pieces.extend(pieces[start:stop])
            if lower.suspect:
                child.acks.extend((handle, choice, len(log.ids)))
                clear_if_proven(request)
        if start <= stop and index in ends:
            _end(log, *ends[index])
        elif start >= stop:
            continue
        growths.append((log, have))
        if not lower.accepted:
            lower.accepted = not log.failed
    return growths, gaps


def _text_of(message: TokenDelta | TextDelta) -> tuple[Sequence[str] | None, dict[int, tuple[End, str]]]:
    """The pieces of all rows, and the END rows by index with the last piece of each."""
    if isinstance(message, TextDelta):
        return message.pieces, {index: (end, piece) for index, end, piece in message.ends}
    return None, {index: (end, "") for index, end in message.ends}


def _end(log: Log, end: End, piece: str) -> None:
    request = log.request
    if end.prompt_tokens and not request.prompt_tokens:
        request.prompt_tokens = end.prompt_tokens
    log.end, log.last_piece = end, piece
