"""Event ids: where a client is in its stream, in a form that any gateway can go on from.

An id is ``head + place`` in URL-safe base64 without padding. The head (12 bytes) is the same in a whole stream: the
version, the answer's time, and a check over everything that names the request. The place is a row of LEB128 numbers: 1
if the usage chunk was sent; for each choice ``tokens << 4 | flags``, if there are tokens the digest over their ids
(``shared.hop.digest``), and if offsets are shown the next one: characters, number of bytes, the bytes; with
``include_usage``, for each prompt its length and how much of it was cached.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import struct
from collections.abc import Sequence

from api_gateway.request_log import ChoiceLog, Position, PromptLog, TextOffset
from shared.hop.log import DIGEST_BYTES

VERSION = 2
CHECK_BYTES = 7
MAX_NUMBER = 2**31 - 1
_HEAD = struct.Struct(f"<BI{CHECK_BYTES}s")
_BEGUN, _TAIL, _ENDED, _OFFSET = 1, 2, 4, 8
_MAX_BEGUN = 3
"""Bytes of a character without its last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What the client has of an answer."""

    created: int
    """The answer's ``created``."""
    positions: list[Position]
    """Of each choice, in the order of the answer."""
    prompts: list[tuple[int, int]]
    """(length, cached tokens) of each prompt, as far as they were known; zeros if the answer has no usage."""
    usage_sent: bool


class EventIds:
    """Makes the ids of one stream: say what each event will have brought, then take the line before it.

    Args:
        check: names the request (``CHECK_BYTES``).
        created: the answer's.
        choices: of the answer.
        prompts: for usage; none without ``include_usage``.
    """

    def __init__(self, check: bytes, created: int, choices: Sequence[ChoiceLog], prompts: Sequence[PromptLog]) -> None:
        # Of 12 bytes, so that the base64 of what follows can be appended to theirs.
        self._head = b"id: " + base64.urlsafe_b64encode(_HEAD.pack(VERSION, created, check))
        self._prompts = prompts
        self._parts = [_pack(choice.resumed or Position()) for choice in choices]
        self._usage_sent = False

    def move(self, index: int, position: Position) -> None:
        """The next event brings a choice to ``position``."""
        self._parts[index] = _pack(position)

    def usage(self) -> None:
        """The next event is the usage chunk."""
        self._usage_sent = True

    def line(self) -> bytes:
        """The ``id`` line of the next event."""
        numbers = [number for prompt in self._prompts for number in (prompt.prompt_tokens, prompt.cached_tokens)]
        place = b"".join((b"\1" if self._usage_sent else b"\0", *self._parts, *map(_number, numbers)))
        return self._head + base64.urlsafe_b64encode(place).rstrip(b"=") + b"\n"


def parse_event_id(text: str, check: bytes, *, choices: int, prompts: int, with_usage: bool) -> Place:
    """Read an id of ``EventIds``.

    Args:
        check: of the request that resumes.
        choices, prompts: that it has.
        with_usage: it has ``include_usage``.

    Raises:
        ValueError: it is no event id.
        LookupError: it is one of another request.
    """
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        version, created, found = _HEAD.unpack_from(data)
    except (binascii.Error, struct.error) as error:
        raise ValueError(str(error)) from None
    if version != VERSION:
        raise ValueError(f"version {version}")
    if found != check:
        raise LookupError("another request's")
    reader = _Reader(data, _HEAD.size)
    usage_sent = bool(reader.number())
    positions = [reader.position() for _ in range(choices)]
    lengths = [(reader.number(), reader.number()) if with_usage else (0, 0) for _ in range(prompts)]
    if reader.offset != len(data):
        raise ValueError("too long")
    return Place(created, positions, lengths, usage_sent)


def _pack(position: Position) -> bytes:
    flags = _BEGUN * position.begun | _TAIL * position.tail | _ENDED * position.ended
    made = position.digest if position.tokens else b""
    if position.offset is not None:
        flags |= _OFFSET
        characters, begun = position.offset
        made += _number(characters) + _number(len(begun)) + begun
    return _number(position.tokens << 4 | flags) + made


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


class _Reader:
    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self.offset = offset

    def number(self) -> int:
        value = shift = 0
        while True:
            if self.offset >= len(self._data) or shift > 35:
                raise ValueError("a number is cut or too large")
            byte = self._data[self.offset]
            self.offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def position(self) -> Position:
        number = self.number()
        tokens, flags = number >> 4, number & 15
        if tokens > MAX_NUMBER:
            raise ValueError("too many tokens")
        found = Position(begun=bool(flags & _BEGUN), tail=bool(flags & _TAIL), ended=bool(flags & _ENDED))
        if tokens:
            found = dataclasses.replace(found, tokens=tokens, digest=self._bytes(DIGEST_BYTES))
        if flags & _OFFSET:
            found = dataclasses.replace(found, offset=self._text_offset())
        return found

    def _text_offset(self) -> TextOffset:
        characters, begun = self.number(), self.number()
        if begun > _MAX_BEGUN:
            raise ValueError("a character is too long")
        return TextOffset(characters, self._bytes(begun))

    def _bytes(self, count: int) -> bytes:
        found = self._data[self.offset : self.offset + count]
        self.offset += count
        if len(found) != count:
            raise ValueError("it is cut")
        return found
