"""The frames of a message as one part of ZeroMQ's.

A DEALER that is connected with ``IMMEDIATE`` gives up its pipe when the peer's connection is lost, also between two
parts of a message that is being read: libzmq then ends the whole process (``Assertion failed: !_more``, ``fq.cpp``). A
message of a single part cannot be cut like that.

A message of several frames is ``uint32 count, uint32 length of each`` (little-endian), then the frames, each of these
begun at a multiple of ``ALIGNMENT``, so that arrays are read where they lie. A message of one frame is that frame: it
begins with the type of a msgpack array, which no count does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

from shared.errors import ProtocolError

Frame: TypeAlias = bytes | memoryview
ALIGNMENT = 8
LARGEST_COUNT = 0x7F
"""A first byte beyond this is of a msgpack array."""
_PADDING = bytes(ALIGNMENT - 1)


def join(frames: Sequence[bytes]) -> bytes:
    """``frames``, at most ``LARGEST_COUNT``, as one part."""
    if len(frames) == 1:
        return frames[0]
    parts = [struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames))]
    for frame in frames:
        parts += (_PADDING[: -len(parts[-1]) % ALIGNMENT], frame)
    return b"".join(parts)


def split(part: bytes) -> list[Frame]:
    """What ``join`` was given. Views of ``part``, where there are several.

    Raises:
        ProtocolError: they do not fill it exactly.
    """
    if not part or part[0] > LARGEST_COUNT:
        return [part]
    count = int.from_bytes(part[:4], "little")
    place = 4 + 4 * count
    if count > LARGEST_COUNT or len(part) < place:
        raise ProtocolError(f"a message of {len(part)} bytes cannot hold {count} frames")
    view, frames = memoryview(part), list[Frame]()
    for length in struct.unpack_from(f"<{count}I", part, 4):
        place += -place % ALIGNMENT
        frames.append(view[place : place + length])
        place += length
    if place != len(part):
        raise ProtocolError(f"a message of {len(part)} bytes has frames of {place}")
    return frames
