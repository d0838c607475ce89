"""Several frames in one part: whole again or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.frames import ALIGNMENT, join, split

HEAD = b"\x93\x02\x13head"
"""Begins as a msgpack array does."""


@given(st.lists(st.binary(max_size=40), max_size=9))
def test_frames_are_whole_again(arrays: list[bytes]) -> None:
    frames = [HEAD, *arrays]
    part = join(frames)
    assert [bytes(frame) for frame in split(part)] == frames
    assert (part == HEAD) == (len(frames) == 1), "a message of one frame is that frame"


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=9), st.data())
def test_what_is_cut_or_grown_is_refused(arrays: list[bytes], data: st.DataObject) -> None:
    part = join([HEAD, *arrays])
    end = data.draw(st.integers(1, len(part) - 1))
    for wrong in (part[:end], part + b"x"):
        with pytest.raises(ProtocolError):
            split(wrong)


@given(st.binary(max_size=64))
def test_anything_is_split_or_refused(part: bytes) -> None:
    try:
        frames = split(part)
    except ProtocolError:
        return
    assert sum(map(len, frames)) <= len(part)


def test_arrays_are_aligned() -> None:
    arrays = [np.arange(length, dtype=np.int32) for length in (1, 2, 3)]
    for frame, array in zip(split(join([HEAD, *map(np.ndarray.tobytes, arrays)]))[1:], arrays, strict=True):
        found = np.frombuffer(frame, np.int32)
        assert found.flags.aligned
        assert found.ctypes.data % ALIGNMENT == 0
        assert found.tolist() == array.tolist()
