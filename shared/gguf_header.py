"""The header of a GGUF file: metadata and tensor descriptions, without reading any tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).

String arrays (vocabularies of 10^5 entries) are walked, not decoded, until somebody asks for them, so that a process
that needs a few numbers pays a few milliseconds.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from shared.errors import StartupError

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_LENGTH = struct.Struct("<Q")
_U32 = _SCALARS[4]

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""ggml type: (name, elements in a block, bytes of a block)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first (numpy's order; the file has the reverse)."""
    ggml_type: int
    """Key of ``GGML_TYPES``."""
    offset: int
    """Of its first byte, from the start of the file."""
    nbytes: int


class GgufStrings(Sequence[str]):
    """An array of strings inside the header, decoded when first read. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, data: mmap.mmap, start: int, end: int, count: int) -> None:
        self._data, self._start, self._end, self._count = data, start, end, count

    @property
    def raw(self) -> bytes:
        """The array as the file has it: for each string its length (uint64) and its bytes."""
        return self._data[self._start : self._end]

    @cached_property
    def _strings(self) -> list[str]:
        raw, position, strings = self.raw, 0, []
        unpack = _LENGTH.unpack_from
        for _ in range(self._count):
            begin = position + 8
            position = begin + unpack(raw, position)[0]
            strings.append(raw[begin:position].decode("utf-8", "replace"))
        return strings

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._strings[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings)


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any]
    """Scalars as int, float, bool or str; arrays of numbers as numpy arrays, of strings as ``GgufStrings``."""
    tensors: dict[str, GgufTensor]
    """By name, in the file's order."""
    data_offset: int
    """Of the first tensor, from the start of the file."""


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read metadata and tensor descriptions.

    Raises:
        StartupError: the file is missing, not GGUF, of another version or byte order, or cut short.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(data).header()
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the GGUF file {path}: {error}") from error
    except (struct.error, IndexError) as error:
        raise StartupError(f"the GGUF file {path} is cut short or damaged in its header") from error


class _Reader:
    """A position in the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def header(self) -> GgufHeader:
        if self.data[:4] != _MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        self.position = 4
        version = self.number(_U32)
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported (2 and 3 little-endian are)")
        tensor_count, pair_count = self.number(_LENGTH), self.number(_LENGTH)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string()
            metadata[key] = self.value(self.number(_U32))
        described = [self.tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", 32))
        data_offset = -(-self.position // alignment) * alignment
        tensors = {t.name: dataclasses.replace(t, offset=data_offset + t.offset) for t in described}
        for tensor in tensors.values():
            if tensor.offset + tensor.nbytes > len(self.data):
                raise ValueError(f"tensor {tensor.name} ends behind the end of the file; is the download complete?")
        return GgufHeader(metadata, tensors, data_offset)

    def number(self, layout: struct.Struct) -> Any:
        value = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def string(self) -> str:
        length = self.number(_LENGTH)
        self.position += length
        if self.position > len(self.data):
            raise IndexError
        return self.data[self.position - length : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.number(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.number(_U32), self.number(_LENGTH)
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind} in an array")
        layout = _SCALARS[kind]
        start = self.position
        self.position += count * layout.size
        dtype = np.dtype("?" if kind == _BOOL else layout.format)
        return np.frombuffer(self.data[start : self.position], dtype, count)

    def strings(self, count: int) -> GgufStrings:
        data, position, unpack = self.data, self.position, _LENGTH.unpack_from
        start = position
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        if position > len(data):
            raise IndexError
        self.position = position
        return GgufStrings(data, start, position, count)

    def tensor(self) -> GgufTensor:
        """A description whose offset still counts from the start of the data."""
        name = self.string()
        shape = tuple(reversed([self.number(_LENGTH) for _ in range(self.number(_U32))]))
        ggml_type, offset = self.number(_U32), self.number(_LENGTH)
        if ggml_type not in GGML_TYPES:
            raise ValueError(f"tensor {name} has the unknown type {ggml_type}")
        _, block, size = GGML_TYPES[ggml_type]
        elements = 1
        for extent in shape:
            elements *= extent
        return GgufTensor(name, shape, ggml_type, offset, elements // block * size)
