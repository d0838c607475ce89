"""Which kernel computes which product: measured where the device and the shape are known, else by a rule.

Measurements come from ``gemm_choices.json`` beside this module (made by ``benchmarks/gpu_gemm.py``) and, over it, from
a file of this user's cache that :mod:`gpu_worker.layers.gemm_tuning` adds to. Only the number of tokens, which the host
knows, decides at run time, so that a choice may be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig, decode_choice, encode_choice
from shared.logging import get_logger

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of tokens that are measured; others take the choice of the next one. More than the last is for cuBLAS."""

MAX_TOKENS = BUCKETS[-1]
MAX_GEMV_TOKENS = 4
SHIPPED = pathlib.Path(__file__).with_name("gemm_choices.json")

NUM_SMS = 132
"""Multiprocessors that the rule fills: those of an H100 or H200."""
SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor of compute capability 9.0 that its programs can use."""

Measured: TypeAlias = dict[str, dict[int, GemmChoice]]
"""Choices by shape key and bucket."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A weight [out_features, in_features] of a dtype, and the dtype of what its product gives.

    Where ``gated``, that is ``silu(gate) * up`` of the product's halves.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    gated: bool = False

    @property
    def key(self) -> str:
        """``bfloat16 4096x1024``, `` gated``, and `` -> float32`` where the result has another dtype."""
        key = f"{_name(self.dtype)} {self.out_features}x{self.in_features}{' gated' if self.gated else ''}"
        return key if self.out_dtype == self.dtype else f"{key} -> {_name(self.out_dtype)}"

    @property
    def nbytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bucket_of(tokens: int) -> int | None:
    """The bucket that decides for a number of tokens, or None where there are more than any has."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), None)


def choices_for(shape: GemmShape, device_name: str) -> tuple[GemmChoice, ...]:
    """The choice for each number of tokens from 0 to ``MAX_TOKENS`` on the named device."""
    measured = known_choices(device_name).get(shape.key, {})
    by_bucket = {bucket: measured.get(bucket, rule(shape, bucket)) for bucket in BUCKETS}
    return tuple(by_bucket[bucket_of(tokens) or MAX_TOKENS] for tokens in range(MAX_TOKENS + 1))


def rule(shape: GemmShape, tokens: int) -> GemmChoice:
    """What is likely to be fast for a shape that was never measured.

    cuBLAS is far off at one to four tokens on narrow outputs and slightly slower up to 16, for small weights up to 32.
    """
    if shape.dtype.itemsize != 2 or shape.in_features % 16:
        return None
    if tokens <= MAX_GEMV_TOKENS:
        return _gemv_rule(shape, tokens)
    small = shape.out_features * shape.in_features <= 2**24
    if tokens > (32 if small else 16):
        return None
    return with_parts(shape, tokens, SplitKConfig(64, 16 if tokens <= 16 else 32, 128, 1, 4, 4))


def _gemv_rule(shape: GemmShape, tokens: int) -> GemvConfig:
    """As many rows a program as leave eight programs to each multiprocessor and their sums in registers."""
    rows = 1
    while rows < (4 if tokens <= 2 else 2) and shape.out_features >= 2 * rows * NUM_SMS * 8:
        rows *= 2
    # A thread takes eight neighbouring elements, so that this block needs no exchange between threads on the way.
    warps = next((warps for warps in (4, 2) if shape.in_features % (256 * warps) == 0), 1)
    return GemvConfig(rows, 256 * warps, warps)


def invariant_config(shape: GemmShape) -> SplitKConfig:
    """The one kernel that computes a shape for every number of tokens where results must not depend on it."""
    if shape.dtype.itemsize != 2:
        return with_parts(shape, 1, SplitKConfig(64, 32, 32, 1, 4, 2))
    return with_parts(shape, 1, SplitKConfig(128 if shape.out_features >= 4096 else 64, 64, 64, 1, 4, 4))


def with_parts(shape: GemmShape, tokens: int, tile: SplitKConfig, waves: int = 1) -> SplitKConfig:
    """The tile with as many parts as fit into so many full waves of programs, each of two blocks or more."""
    tiles = -(-shape.out_features // tile.block_n) * -(-tokens // tile.block_m)
    resident = max(1, min(8, SHARED_BYTES // tile.shared_bytes(shape.dtype.itemsize)))
    blocks = -(-shape.in_features // tile.block_k)
    parts = max(1, min(NUM_SMS * resident * waves // tiles, blocks // 2, 16))
    per_part = -(-blocks // parts)
    return SplitKConfig(tile.block_n, tile.block_m, tile.block_k, -(-blocks // per_part), tile.warps, tile.stages)


@functools.cache
def known_choices(device_name: str) -> Measured:
    """What was measured on such a device: shipped with the program, and over it this user's own."""
    known = read_choices(json.loads(SHIPPED.read_text()).get(device_name, {}))
    for key, choices in load_cached(device_name).items():
        known.setdefault(key, {}).update(choices)
    return known


def read_choices(entries: Mapping[str, Mapping[str, Any]]) -> Measured:
    """Choices as they stand in a file.

    Raises:
        ValueError: an entry that is no choice, or one for more tokens than its kernel takes.
    """
    measured: Measured = {}
    for key, choices in entries.items():
        for bucket, entry in choices.items():
            choice = decode_choice(entry)
            if isinstance(choice, GemvConfig) and int(bucket) > MAX_GEMV_TOKENS:
                raise ValueError(f"{key}: a matrix-vector product cannot take {bucket} tokens")
            measured.setdefault(key, {})[int(bucket)] = choice
    return measured


def write_choices(measured: Measured) -> dict[str, dict[str, list[str | int]]]:
    """The choices as :func:`read_choices` reads them."""
    return {
        key: {str(bucket): encode_choice(choice) for bucket, choice in sorted(choices.items())}
        for key, choices in measured.items()
    }


def cache_file(device_name: str) -> pathlib.Path:
    """Where this user's measurements are: ``$XDG_CACHE_HOME/headrace/gemm``, which is in ``~/.cache`` by default."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "headrace" / "gemm" / (re.sub(r"[^A-Za-z0-9._-]+", "_", device_name) + ".json")


def load_cached(device_name: str) -> Measured:
    """This user's measurements with the installed libraries; none where there are none or they cannot be read."""
    path = cache_file(device_name)
    try:
        stored = json.loads(path.read_text())
        return read_choices(stored["choices"]) if stored["libraries"] == _libraries() else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        get_logger().warning("stored choices of matrix products cannot be read", path=str(path), error=str(error))
        return {}


def store_cached(device_name: str, measured: Measured) -> None:
    """Add measurements to this user's, for the next start.

    Raises:
        OSError: the file cannot be written.
    """
    merged = load_cached(device_name)
    for key, choices in measured.items():
        merged.setdefault(key, {}).update(choices)
    path = cache_file(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"libraries": _libraries(), "choices": write_choices(merged)}))
    partial.replace(path)


def _libraries() -> str:
    return f"torch {torch.__version__}"
