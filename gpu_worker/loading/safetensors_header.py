"""Where the tensors of a safetensors file lie in it. Imports no torch.

The file is eight bytes with the length of its description, the description in JSON, and the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import StartupError

MAX_DESCRIPTION_BYTES = 100 * 10**6
"""What the format allows."""
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""torch's name of a dtype, and the bytes of an element."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    dtype: str
    """torch's name of it; the file's where torch has none."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of ``path``.

    Raises:
        StartupError: it cannot be read, is no such file, or is shorter than its tensors; the text names it.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_DESCRIPTION_BYTES:
                raise ValueError("it does not begin like a safetensors file")
            description = json.loads(file.read(length))
            size = file.seek(0, os.SEEK_END)
        description.pop("__metadata__", None)
        tensors = {name: _stored(entry, 8 + length) for name, entry in description.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise StartupError(f"cannot read the weights in {path}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.offset + tensor.nbytes > size:
            raise StartupError(f"the file {path} ends before the tensor {name} does; is the checkpoint complete?")
    return tensors


def _stored(entry: Mapping[str, Any], start: int) -> StoredTensor:
    first, end = entry["data_offsets"]
    dtype, itemsize = DTYPES.get(entry["dtype"], (entry["dtype"], 0))
    shape = tuple(int(size) for size in entry["shape"])
    if first < 0 or (itemsize and end - first != itemsize * math.prod(shape)):
        raise ValueError(f"a tensor of shape {list(shape)} and type {dtype} lies from {first} to {end}")
    return StoredTensor(dtype, shape, start + first, end - first)
