"""Messages to frames and back.

Frame 0 is a msgpack array ``[protocol version, tag, boot of the sender, *fields, checksum]``; one raw little-endian
int32 frame follows for each array of the message, in the order of its ``ARRAYS``. One encoder and one decoder per class
are made from its annotations at import. What arrives is not trusted: whatever is wrong with it, ``decode`` raises
``ProtocolError`` and nothing else.

The checksum is a CRC-32 of frame 0 up to the checksum's own four bytes, which are its last, and of the length and the
bytes of each further frame. So it notices frames that are missing, repeated or in another order as well.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from shared.errors import ProtocolError
from shared.frames import Frame
from shared.message_checks import check_message
from shared.messages import MESSAGES, OLDEST_PROTOCOL, PROTOCOL_VERSION, Hello, Int32, Message

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""All frames of one message together."""
MAX_ITEMS = 1 << 20
"""Items of one list or map of a message."""
MAX_FRAMES = 32
CHECKSUM_BYTES = 4

Convert = Callable[[Any], Any]

_INT32 = np.dtype("<i4")
_INT64_LOW, _INT64_HIGH = -(2**63), 2**63 - 1
_ROOM = 2**32 - 1
"""In place of the checksum until it is known: a number that msgpack writes as one byte of type and four of value."""
_NUM_HEADER = 3
_PLAIN_HELLOS = tuple(bytes((0x90 | length, 1, 32)) for length in range(9, 13))
"""How a Hello of protocol 1, which knew no checksum, begins: an array of 9 to 12, the version, the tag."""


def encode(message: Message, boot: int) -> list[bytes]:
    """The frames of a message; ``boot`` is the sender's.

    Raises:
        ValueError: an array is not int32 or has the wrong shape.
    """
    return _CODECS_BY_TYPE[type(message)].encode(message, boot)


def decode(frames: Sequence[Frame]) -> tuple[int, Message]:
    """The boot id of the sender, and the message; its arrays are read-only int32 views of the frames.

    Raises:
        ProtocolError: the frames are not a message of a protocol that this process speaks.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, got {len(frames)}")
    size = sum(memoryview(frame).nbytes for frame in frames)
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {size} bytes is larger than {MAX_MESSAGE_BYTES}")
    head = memoryview(frames[0])
    checksum = _checksum(head[:-CHECKSUM_BYTES], frames)
    if head[-CHECKSUM_BYTES:] != checksum:
        return _decode_plain_hello(frames)
    header = _unpack(head)
    if type(header) is not list or len(header) <= _NUM_HEADER or header.pop() != int.from_bytes(checksum):
        raise ProtocolError("frame 0 is not [version, tag, boot, ..., checksum]")
    version, tag, boot = header[:_NUM_HEADER]
    if type(version) is not int or version < OLDEST_PROTOCOL:
        raise ProtocolError(f"protocol {version!r} is not spoken here; the oldest is {OLDEST_PROTOCOL}")
    codec = _CODECS_BY_TAG.get(tag) if type(tag) is int else None
    if codec is None:
        raise ProtocolError(f"unknown message tag {tag!r}")
    message = codec.decode(header, frames)
    check_message(message)
    return _decode_int(boot), message


def _checksum(head: Frame, frames: Sequence[Frame]) -> bytes:
    """Of ``head``, which is frame 0 without its checksum, and of the frames after frame 0."""
    checksum = zlib.crc32(head)
    for frame in frames[1:]:
        checksum = zlib.crc32(frame, zlib.crc32(len(frame).to_bytes(CHECKSUM_BYTES), checksum))
    return checksum.to_bytes(CHECKSUM_BYTES)


def _decode_plain_hello(frames: Sequence[Frame]) -> tuple[int, Message]:
    """A Hello without a checksum, of a process of protocol 1: read only so that it can be told why it is refused.

    Raises:
        ProtocolError: it is anything else.
    """
    wrong = ProtocolError("checksum does not match")
    if len(frames) > 1 or bytes(frames[0][:_NUM_HEADER]) not in _PLAIN_HELLOS:
        raise wrong
    header = _unpack(frames[0])
    hello: Hello = _CODECS_BY_TYPE[Hello].decode(header, frames)
    if hello.protocol >= OLDEST_PROTOCOL:
        raise wrong
    return _decode_int(header[2]), hello


def _unpack(frame: Frame) -> Any:
    try:
        return msgpack.unpackb(
            frame,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except ProtocolError:
        raise
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame 0 is not msgpack: {type(error).__name__}: {error}") from error


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"msgpack extension type {code}")


class _MessageCodec:
    """The encoder and decoder of one message class."""

    def __init__(self, tag: int, cls: type[Any]) -> None:
        self._cls = cls
        self._prefix = (PROTOCOL_VERSION, tag)
        columns: dict[str, int] = getattr(cls, "ARRAYS", {})
        hints = get_type_hints(cls)
        fields = dataclasses.fields(cls)
        plain = [field for field in fields if field.name not in columns]
        self._encode_plain = _fields_encoder(plain, hints)
        self._decode_plain = _FieldsDecoder(cls.__name__, plain, hints)
        self._arrays = [(name, columns[name], operator.attrgetter(name)) for name in columns]
        # Trailing ones that older peers do not send: they are empty.
        self._num_optional = sum(f.name in columns and f.default_factory is not dataclasses.MISSING for f in fields)
        # Where each field of the constructor comes from: the plain fields, then the arrays.
        order = [field.name for field in plain] + list(columns)
        self._positions = [order.index(field.name) for field in fields]
        self._in_order = self._positions == list(range(len(fields)))

    def encode(self, message: Any, boot: int) -> list[bytes]:
        head = _pack((*self._prefix, boot, *self._encode_plain(message), _ROOM))[:-CHECKSUM_BYTES]
        frames = [head]
        for name, columns, get in self._arrays:
            array = get(message)
            if array.dtype != _INT32 or (array.ndim != 1 if columns == 0 else array.shape[1:] != (columns,)):
                raise ValueError(f"{self._cls.__name__}.{name}: {array.dtype}{array.shape} is not int32 x {columns}")
            frames.append(array.tobytes())
        frames[0] = head + _checksum(head, frames)
        return frames

    def decode(self, header: list[Any], frames: Sequence[Frame]) -> Any:
        values = self._decode_plain(header, _NUM_HEADER)
        missing = len(self._arrays) + 1 - len(frames)
        if missing > self._num_optional:
            raise ProtocolError(f"{self._cls.__name__} has {len(self._arrays)} arrays, got {len(frames) - 1}")
        if missing > 0:
            frames = [*frames, *[b""] * missing]
        for (name, columns, _), frame in zip(self._arrays, frames[1:], strict=False):
            values.append(_decode_array(f"{self._cls.__name__}.{name}", columns, frame))
        if not self._in_order:
            values = [values[position] for position in self._positions]
        return self._cls(*values)


def _pack(values: tuple[Any, ...]) -> bytes:
    try:
        packed: bytes = msgpack.packb(values)
    except UnicodeEncodeError:
        # A lone surrogate, which UTF-8 cannot carry: a message that could never be sent would wedge its request.
        packed = msgpack.packb(values, unicode_errors="replace")
    return packed


def _decode_array(name: str, columns: int, frame: Frame) -> Int32:
    size = memoryview(frame).nbytes
    if size % (4 * max(columns, 1)):
        raise ProtocolError(f"{name}: {size} bytes are not int32 x {columns}")
    array: Int32 = np.frombuffer(frame, _INT32)
    array.flags.writeable = False
    return array.reshape(-1, columns) if columns else array


def _fields_encoder(fields: Sequence[dataclasses.Field[Any]], hints: dict[str, Any]) -> Callable[[Any], Sequence[Any]]:
    """A function from an object to the packable values of these fields."""
    if not fields:
        return lambda _: ()
    names = [field.name for field in fields]
    get = operator.attrgetter(*names)
    converts = [(i, convert) for i, name in enumerate(names) if (convert := _encoder(hints[name])) is not None]
    if len(names) == 1:
        only = converts[0][1] if converts else None
        return (lambda value: (only(get(value)),)) if only else (lambda value: (get(value),))
    if not converts:
        return typing.cast(Callable[[Any], Sequence[Any]], get)

    def encode_fields(value: Any) -> Sequence[Any]:
        values = list(get(value))
        for i, convert in converts:
            values[i] = convert(values[i])
        return values

    return encode_fields


class _FieldsDecoder:
    """From a list, beginning at an index, to the values of fields; missing trailing ones take their defaults."""

    def __init__(self, owner: str, fields: Sequence[dataclasses.Field[Any]], hints: dict[str, Any]) -> None:
        self._owner = owner
        self._fields = fields
        self._converts = [_decoder(hints[field.name]) for field in fields]

    def __call__(self, values: list[Any], start: int) -> list[Any]:
        if start:
            values = values[start:]
        try:
            decoded = [convert(value) for convert, value in zip(self._converts, values, strict=False)]
        except ProtocolError:
            raise self._located(values) from None
        if len(decoded) < len(self._fields):
            decoded += [self._default(field) for field in self._fields[len(decoded) :]]
        return decoded

    def _located(self, values: list[Any]) -> ProtocolError:
        """The error of the first value that does not decode, with the name of its field."""
        for field, convert, value in zip(self._fields, self._converts, values, strict=False):
            try:
                convert(value)
            except ProtocolError as error:
                return ProtocolError(f"{self._owner}.{field.name}: {error}")
        raise AssertionError("every value decodes")

    def _default(self, field: dataclasses.Field[Any]) -> Any:
        if field.default is not dataclasses.MISSING:
            return field.default
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        raise ProtocolError(f"{self._owner}.{field.name} is missing")


# -- by annotation ---------------------------------------------------------------------------------------------------


def _encoder(hint: Any) -> Convert | None:
    """How a value of this type becomes packable; None: it is."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union_encoder(hint)
    if origin is list:
        item = _encoder(args[0])
        return None if item is None else lambda values: [item(value) for value in values]
    if origin is tuple:
        items = [_encoder(arg) for arg in args]
        if not any(items):
            return None
        return lambda values: [
            value if convert is None else convert(value) for convert, value in zip(items, values, strict=True)
        ]
    if dataclasses.is_dataclass(hint):
        return _fields_encoder(dataclasses.fields(hint), get_type_hints(hint))
    return None


def _union_encoder(hint: Any) -> Convert | None:
    parts = _parts_of_union(hint)
    if len(parts) > 1:
        encoders = {part: (index, _encoder(part)) for index, part in enumerate(parts)}

        def encode_part(value: Any) -> Any:
            index, convert = encoders[type(value)]
            return [index, value if convert is None else convert(value)]

        return encode_part
    convert = _encoder(parts[0]) if parts else None
    return None if convert is None else lambda value: None if value is None else convert(value)


def _parts_of_union(hint: Any) -> list[Any]:
    """The dataclasses of a union. More than one of them are told apart by their index, sent before the value."""
    return [arg for arg in get_args(hint) if dataclasses.is_dataclass(arg)]


def _decoder(hint: Any) -> Convert:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin in (Union, types.UnionType):
        return _union_decoder(hint)
    if origin is list:
        return _strings_decoder if args[0] is str else _list_decoder(_decoder(args[0]))
    if origin is tuple:
        return _tuple_decoder([_decoder(arg) for arg in args])
    if origin is dict:
        return _dict_decoder(_decoder(args[0]), _decoder(args[1]))
    if dataclasses.is_dataclass(hint):
        return _part_decoder(typing.cast(type[Any], hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_decoder(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        types_of_fields = get_type_hints(hint)
        convert = _tuple_decoder([_decoder(types_of_fields[name]) for name in hint._fields])
        return lambda value: hint(*convert(value))
    raise TypeError(f"no decoder for {hint!r}")


def _wrong(expected: str, value: Any) -> ProtocolError:
    return ProtocolError(f"expected {expected}, got {type(value).__name__}")


def _decode_int(value: Any) -> int:
    if type(value) is not int or not _INT64_LOW <= value <= _INT64_HIGH:
        raise _wrong("a 64-bit int", value)
    return value


def _decode_float(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int:
        return float(value)
    raise _wrong("a finite float", value)


def _exactly(kind: type[Any]) -> Convert:
    def decode_exactly(value: Any) -> Any:
        if type(value) is not kind:
            raise _wrong(kind.__name__, value)
        return value

    return decode_exactly


_SCALARS: dict[Any, Convert] = {
    int: _decode_int,
    float: _decode_float,
    bool: _exactly(bool),
    str: _exactly(str),
    bytes: _exactly(bytes),
    type(None): _exactly(type(None)),
}


def _list_decoder(item: Convert) -> Convert:
    def decode_list(value: Any) -> Any:
        if type(value) is not list:
            raise _wrong("a list", value)
        return [item(entry) for entry in value]

    return decode_list


def _strings_decoder(value: Any) -> Any:
    # One text piece per token: the longest lists there are.
    if type(value) is not list or not set(map(type, value)) <= {str}:
        raise _wrong("a list of str", value)
    return value


def _tuple_decoder(items: Sequence[Convert]) -> Convert:
    def decode_tuple(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise _wrong(f"a list of {len(items)}", value)
        return tuple(convert(entry) for convert, entry in zip(items, value, strict=True))

    return decode_tuple


def _dict_decoder(key: Convert, item: Convert) -> Convert:
    def decode_dict(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong("a map", value)
        return {key(name): item(entry) for name, entry in value.items()}

    return decode_dict


def _part_decoder(cls: type[Any]) -> Convert:
    fields = _FieldsDecoder(cls.__name__, dataclasses.fields(cls), get_type_hints(cls))

    def decode_part(value: Any) -> Any:
        if type(value) is not list:
            raise _wrong(f"a list ({cls.__name__})", value)
        return cls(*fields(value, 0))

    return decode_part


def _enum_decoder(cls: type[enum.Enum]) -> Convert:
    members = {member.value: member for member in cls}

    def decode_enum(value: Any) -> Any:
        if type(value) is not int or value not in members:
            raise _wrong(cls.__name__, value)
        return members[value]

    return decode_enum


def _union_decoder(hint: Any) -> Convert:
    parts = _parts_of_union(hint)
    if len(parts) > 1:
        decoders = [_decoder(part) for part in parts]

        def decode_part(value: Any) -> Any:
            if type(value) is not list or len(value) != 2 or type(value[0]) is not int:
                raise _wrong("[kind, value]", value)
            if not 0 <= value[0] < len(decoders):
                raise ProtocolError(f"kind {value[0]} is not one of {[part.__name__ for part in parts]}")
            return decoders[value[0]](value[1])

        return decode_part
    # A union of types that msgpack tells apart by itself: None, scalars, and at most one list.
    by_type: dict[type[Any], Convert] = {}
    for arg in get_args(hint):
        by_type[arg if arg in _SCALARS else list] = _decoder(arg)
    if float in by_type:
        by_type.setdefault(int, by_type[float])

    def decode_union(value: Any) -> Any:
        convert = by_type.get(type(value))
        if convert is None:
            raise _wrong(str(hint), value)
        return convert(value)

    return decode_union


_CODECS_BY_TAG = {tag: _MessageCodec(tag, cls) for tag, cls in MESSAGES.items()}
_CODECS_BY_TYPE = {cls: _CODECS_BY_TAG[tag] for tag, cls in MESSAGES.items()}
