"""Frames: every message survives the way there and back, and nothing that arrives raises anything but ProtocolError."""

from __future__ import annotations

import dataclasses
import enum
import types
import zlib
from typing import Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import MAX_FRAMES, MAX_ITEMS, decode, encode
from shared.errors import ProtocolError
from shared.messages import (
    MESSAGES,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Attempt,
    End,
    Epoch,
    ErrorInfo,
    FinishReason,
    Go,
    Hello,
    Known,
    Load,
    Step,
    Submit,
    TextDelta,
    TextSpec,
    TokenDelta,
    TokenSpec,
)
from shared.sampling import SamplingParams

few = settings(max_examples=25, deadline=None)
many = settings(max_examples=150, deadline=None)

INT64 = st.integers(-(2**63), 2**63 - 1)
SIMPLE = {
    int: INT64,
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    bytes: st.binary(max_size=8).map(lambda data: data[: len(data) // 4 * 4]),
    type(None): st.none(),
}


def values_of(hint):
    """A strategy for any type that messages use."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in SIMPLE:
        return SIMPLE[hint]
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, args))
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    hints = get_type_hints(hint)
    names = hint._fields if issubclass(hint, tuple) else [field.name for field in dataclasses.fields(hint)]
    return st.builds(lambda *parts: hint(*parts), *(values_of(hints[name]) for name in names))


def int32(*shape):
    return st.builds(
        lambda seed: np.random.default_rng(seed).integers(0, 2**31, shape, dtype=np.int64).astype(np.int32),
        st.integers(0, 2**32),
    )


def arrays_of(columns):
    return st.integers(0, 4).flatmap(lambda rows: int32(rows, columns) if columns else int32(rows))


def counts_for(total, parts):
    return st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1).map(
        lambda cuts: np.diff([0, *sorted(cuts), total]).astype(np.int32)
    )


@st.composite
def messages(draw, cls):
    hints, columns = get_type_hints(cls), getattr(cls, "ARRAYS", {})
    fields = {}
    for field in dataclasses.fields(cls):
        in_array = field.name in columns
        fields[field.name] = draw(arrays_of(columns[field.name]) if in_array else values_of(hints[field.name]))
    return cls(**draw(consistent(cls, fields)))


@st.composite
def consistent(draw, cls, fields):
    """Make the parts of a message agree with each other, as ``shared.message_checks`` wants them."""
    name = cls.__name__
    if name == "Submit":
        n = draw(st.integers(1, 3))
        spec = fields["spec"]
        fields["spec"] = dataclasses.replace(spec, params=dataclasses.replace(spec.params, n=n))
        fields["counts"] = draw(counts_for(len(fields["tokens"]), n))
        fields["ends"] = draw(st.lists(values_of(End | None), min_size=n, max_size=n))
        fields["known"] = [Known(draw(st.integers(0, 2**31 - 1)), b"") for _ in range(n)]
        fields["handle"] = draw(st.integers(0, 2**31 - 1))
    elif name == "Ack":
        fields["entries"] = [
            dataclasses.replace(entry, handle=abs(entry.handle) % 2**31, have=[abs(x) % 2**31 for x in entry.have])
            for entry in fields["entries"]
        ]
    elif name in ("TokenDelta", "TextDelta"):
        rows = fields["rows"] = draw(arrays_of(4).filter(len))
        rows[:, 3] = draw(counts_for(len(fields["tokens"]), len(rows)))
        indices = st.integers(0, len(rows) - 1)
        fields["ends"] = [(draw(indices), *rest) for _, *rest in fields["ends"]]
        fields["logprobs"] = [(draw(indices), data) for _, data in fields["logprobs"]]
        if name == "TextDelta":
            fields["pieces"] = [draw(SIMPLE[str]) for _ in fields["tokens"]]
    elif name == "Step":
        new = fields["new"]
        counts = draw(counts_for(len(fields["new_tokens"]), max(len(new), 1))).tolist()
        fields["new"] = [dataclasses.replace(each, num_tokens=c) for each, c in zip(new, counts, strict=False)]
        if not new:
            fields["new_tokens"] = np.zeros(0, np.int32)
        rows = len(fields["prefill"]) + len(fields["decode"])
        fields["sample"] = fields["sample"][: 0 if not rows else None]
        fields["sample"][:, 0] %= max(rows, 1)
    elif name == "StepResult":
        counts = len(fields["counts"])
        fields["counts"] = draw(counts_for(len(fields["tokens"]), counts)) if counts else fields["counts"]
    return fields


any_message = st.sampled_from(list(MESSAGES.values())).flatmap(messages)


def same(one, other):
    if type(one) is not type(other):
        return False
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            if b.dtype != np.int32 or not np.array_equal(a, b) or a.shape != b.shape:
                return False
        elif a != b:
            return False
    return True


def sealed(content, *arrays):
    """Frames with the checksum that they should have. ``content``: what frame 0 is an array of, or its bytes."""
    head = msgpack.packb([*content, 2**32 - 1])[:-4] if isinstance(content, list) else content
    checksum = zlib.crc32(head)
    for array in arrays:
        checksum = zlib.crc32(len(array).to_bytes(4, "big") + array, checksum)
    return [head + checksum.to_bytes(4, "big"), *arrays]


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=lambda cls: cls.__name__)
def test_every_message_survives_the_way_there_and_back(cls):
    @few
    @given(messages(cls), st.integers(0, 2**63 - 1))
    def check(message, boot):
        got_boot, got = decode(encode(message, boot))
        assert got_boot == boot
        assert same(message, got)

    check()


def test_arrays_are_read_only_views():
    frames = encode(a_delta(), 1)
    delta = decode(frames)[1]
    assert not delta.tokens.flags.writeable
    assert delta.tokens.base is not None
    with pytest.raises(ValueError, match="read-only"):
        delta.rows[0, 0] = 1
    assert not decode([memoryview(bytearray(frame)) for frame in frames])[1].tokens.flags.writeable


@many
@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames(frames):
    with pytest.raises(ProtocolError):
        decode(frames)


@many
@given(st.recursive(st.none() | st.booleans() | INT64 | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
                    max_leaves=20), st.sampled_from([*MESSAGES, 0, -1, 99]))  # fmt: skip
def test_random_fields(fields, tag):
    content = [PROTOCOL_VERSION, tag, 1, *(fields if isinstance(fields, list) else [fields])]
    decode_or_refuse(sealed(content, b"", b"", b"", b"", b"", b"", b""))


@many
@given(any_message, st.data())
def test_messages_that_say_something_else_under_a_right_checksum(message, data):
    (head, *arrays), index = encode(message, 1), data.draw(st.integers(0, 7))
    frames = [bytearray(frame) for frame in (head[:-4], *arrays)]
    frame = frames[index % len(frames)]
    kind = data.draw(st.sampled_from(["cut", "turn", "drop", "repeat", "grow"]))
    if kind == "cut":
        del frame[data.draw(st.integers(0, len(frame))) :]
    elif kind == "turn" and frame:
        for _ in range(data.draw(st.integers(1, 3))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    elif kind == "drop" and len(frames) > 1:
        frames.remove(frame)
    elif kind == "repeat":
        frames.insert(index % len(frames), frame)
    else:
        frame += data.draw(st.binary(min_size=1, max_size=8))
    decode_or_refuse(sealed(*map(bytes, frames)))


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=lambda cls: cls.__name__)
def test_a_turned_bit_anywhere_is_noticed(cls):
    @settings(max_examples=8, deadline=None)
    @given(messages(cls), st.integers(0, 2**63 - 1))
    def check(message, boot):
        frames = encode(message, boot)
        for index, frame in enumerate(frames):
            for bit in range(8 * len(frame)):
                turned = bytearray(frame)
                turned[bit // 8] ^= 1 << bit % 8
                refuse([*frames[:index], bytes(turned), *frames[index + 1 :]])

    check()


@many
@given(any_message, st.data())
def test_frames_that_are_missing_repeated_moved_or_cut_are_noticed(message, data):
    frames = encode(message, 1)
    indices = st.integers(0, len(frames) - 1)
    kind = data.draw(st.sampled_from(["missing", "repeated", "extra", "moved", "swapped", "cut", "grown", "border"]))
    index, other = data.draw(indices), data.draw(indices)
    harmed = list(frames)
    if kind == "missing":
        del harmed[index]
    elif kind == "repeated":
        harmed.insert(other, frames[index])
    elif kind == "extra":
        harmed.insert(data.draw(st.integers(0, len(frames))), data.draw(st.binary(max_size=8)))
    elif kind == "moved":
        harmed.insert(other, harmed.pop(index))
    elif kind == "swapped":
        harmed[index], harmed[other] = harmed[other], harmed[index]
    elif kind == "cut":
        harmed[index] = frames[index][: data.draw(st.integers(0, len(frames[index])))]
    elif kind == "grown":
        harmed[index] += data.draw(st.binary(min_size=1, max_size=8))
    elif index:
        # The bytes are the same and in the same order, but some belong to the frame before.
        cut = data.draw(st.integers(0, len(frames[index])))
        harmed[index - 1 : index + 1] = [frames[index - 1] + frames[index][:cut], frames[index][cut:]]
    if harmed != frames:
        refuse(harmed)


def refuse(frames):
    with pytest.raises(ProtocolError):
        decode(frames)


def test_the_checksum_comes_first():
    for frames in (sealed([PROTOCOL_VERSION, 77, 1]), sealed([1, 4, 1]), sealed(b"\xc1"), encode(a_delta(), 1)):
        frames[0] = frames[0][:-1] + bytes((frames[0][-1] ^ 1,))
        with pytest.raises(ProtocolError, match="checksum"):
            decode(frames)
    assert sealed(encode(a_delta(), 1)[0][:-4], *encode(a_delta(), 1)[1:]) == encode(a_delta(), 1)


def decode_or_refuse(frames):
    try:
        message = decode(frames)[1]
    except ProtocolError:
        return
    assert type(message) in MESSAGES.values()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([0, 1, 1], "protocol 0"),
        ([2, 77, 1], "unknown message tag 77"),
        ([2, "x", 1], "unknown message tag"),
        ([2, 4], "frame 0 is not"),
        (msgpack.packb({"a": 1}), "frame 0 is not"),
        ([2, 4, "boot", "r", [1, 2, 3]], "64-bit int"),
        ([2, 4, 1, "r", [1, 2]], r"Abort\.attempt: expected a list of 3"),
        ([2, 4, 1, 5, [1, 2, 3]], r"Abort\.rid: expected str, got int"),
        ([2, 4, 1, "r"], r"Abort\.attempt is missing"),
        ([2, 4, 1, msgpack.ExtType(5, b"x"), [1, 2, 3]], "max_ext_len"),
        ([2, 4, 1, msgpack.ExtType(5, b""), [1, 2, 3]], "extension type 5"),
        ([2, 4, 1, msgpack.Timestamp(1), [1, 2, 3]], "max_ext_len"),
        ([2, 4, 1, "r", [1, 2, True]], "64-bit int, got bool"),
        ([2, 4, 1, "r", [1, 2, 2**64 - 1]], "64-bit int"),
        (msgpack.packb([2, 4, 1, "r", [1, 2, 3]]), "ExtraData"),
        ([2, 21, 1, "engine/0", 1, 0, 0, float("nan"), []], "finite float"),
        (b"\xdd" + (2**32 - 1).to_bytes(4, "big"), "max_array_len"),
        ((b"\xdd" + (MAX_ITEMS).to_bytes(4, "big")) * 2000, "not msgpack"),
        (b"\x91" * 100_000, "not msgpack"),
        (b"\xa4\xff\xff\xff\xff", "not msgpack"),
        (b"", "frame 0 is not|not msgpack"),
        (msgpack.packb([2, 4, 1, "r", [1, 2, 3], b"1234"])[:-4], "frame 0 is not .*checksum"),
    ],
)
def test_refusals_say_what_is_wrong(content, words):
    with pytest.raises(ProtocolError, match=words):
        decode(sealed(content))


def test_number_of_frames():
    with pytest.raises(ProtocolError, match="frames"):
        decode([])
    with pytest.raises(ProtocolError, match="frames"):
        decode(encode(Go("r", Attempt(1, 2, 3)), 1) + [b""] * MAX_FRAMES)


def a_delta():
    return TokenDelta(np.array([[7, 0, 3, 2]], np.int32), np.array([4, 5], np.int32), [(0, End(FinishReason.STOP))])


def a_submit(**changes):
    spec = TokenSpec(SamplingParams(n=2), prompt=np.arange(3, dtype=np.int32).tobytes())
    counts, tokens = np.array([1, 0], np.int32), np.array([9], np.int32)
    submit = Submit("r", Attempt(1, 2, 3), 4, spec, counts, tokens, [None, None], [Known(0, b""), Known(0, b"")])
    return dataclasses.replace(submit, **changes)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (a_submit(counts=np.array([1], np.int32)), "not 2 long"),
        (a_submit(counts=np.array([2, -1], np.int32)), "negative"),
        (a_submit(counts=np.array([1, 1], np.int32)), "do not add up"),
        (a_submit(ends=[None]), "not 2 long"),
        (a_submit(known=[Known(-1, b""), Known(0, b"")]), "known"),
        (a_submit(handle=-1), "handle"),
        (a_submit(spec=TokenSpec(SamplingParams(n=2), prompt=b"abc")), "not int32"),
        (a_submit(spec=TokenSpec(SamplingParams(n=0), prompt=b"")), "0 choices"),
        (dataclasses.replace(a_delta(), ends=[(1, End(FinishReason.STOP))]), "out of range"),
        (dataclasses.replace(a_delta(), tokens=np.zeros(1, np.int32)), "do not add up"),
        (TextDelta(a_delta().rows, a_delta().tokens, ["x"], []), "differ in length"),
    ],
)
def test_parts_that_contradict_each_other(message, words):
    with pytest.raises(ProtocolError, match=words):
        decode(encode(message, 1))


def test_lone_surrogates_are_replaced():
    message = decode(encode(Go("a\ud800b", Attempt(1, 2, 3)), 1))[1]
    assert message.rid == "a?b"


def test_kinds_of_specs_are_told_apart():
    text = TextSpec(SamplingParams(n=2), text="hi")
    assert decode(encode(a_submit(spec=text), 1))[1].spec == text
    assert isinstance(decode(encode(a_submit(), 1))[1].spec, TokenSpec)


def test_older_and_newer_peers():
    header = msgpack.unpackb(encode(Load("engine/0", 1, 2, 3, 0.5, [("a_total", {"x": "y"}, 1.0)]), 9)[0])[:-1]
    assert decode(sealed(header[:8]))[1].metrics == []
    newer = sealed([*header, "a field of the future", {"x": 1}], b"an array of the future")
    assert decode(newer)[1].metrics == [("a_total", {"x": "y"}, 1.0)]
    assert decode(sealed([PROTOCOL_VERSION + 1, *header[1:]]))[0] == 9


def test_arrays_that_an_older_peer_does_not_send_are_empty():
    nothing, pairs = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    prefill, transfers = np.zeros((0, 3), np.int32), np.array([[1, 5, 0]], np.int32)
    step = Step(Epoch(1, 2), 3, [], nothing, prefill, nothing, pairs, pairs, nothing, pairs, transfers)
    head, *arrays = encode(step, 9)
    assert same(decode([head, *arrays])[1], step)
    older = sealed(head[:-4], *arrays[:-1])
    assert same(decode(older)[1], dataclasses.replace(step, transfers=transfers[:0]))
    with pytest.raises(ProtocolError, match="Step has 8 arrays, got 6"):
        decode(sealed(head[:-4], *arrays[:-2]))


def test_peers_from_before_the_checksum_are_understood_well_enough_to_be_refused():
    old = Hello("gateway", "g", 1, 1, True, None)
    header = [1, *msgpack.unpackb(encode(old, 9)[0])[1:-1]]
    for length in (9, len(header)):
        boot, hello = decode([msgpack.packb(header[:length])])
        assert boot == 9
        assert same(hello, old)
    header[6] = OLDEST_PROTOCOL
    load = msgpack.unpackb(encode(Load("engine/0", 1, 2, 3, 0.5, []), 9)[0])[1:-1]
    for content in (header, [2, *header[1:]], header[:8], [*header, 5], [1, *load]):
        refuse([msgpack.packb(content)])
    header[6] = 1
    refuse([msgpack.packb(header), b""])
    header[3] = 5
    refuse([msgpack.packb(header)])


def test_peers_from_before_the_checksum_understand_a_hello():
    """They take frame 0 for one msgpack array, and what is behind the fields that they know for later additions."""
    header = msgpack.unpackb(encode(Hello("engine", "e", 2, 2, True, None, "words"), 9)[0])
    assert header[:10] == [PROTOCOL_VERSION, 32, 9, "engine", "e", 2, 2, True, None, "words"]
    assert len(header) == 13


def test_optional_parts():
    end = End(FinishReason.ERROR, "x", ErrorInfo(1, "words", "field"))
    submit = a_submit(ends=[end, dataclasses.replace(end, stop_reason=5, error=None)])
    assert decode(encode(submit, 1))[1].ends == submit.ends


@pytest.mark.parametrize("rows", [np.zeros((1, 4)), np.zeros((1, 3), np.int32), np.zeros(4, np.int32)])
def test_wrong_arrays_are_not_sent(rows):
    with pytest.raises(ValueError, match="is not int32 x 4"):
        encode(TokenDelta(rows, np.zeros(0, np.int32), []), 1)
