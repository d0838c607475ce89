"""Which kernel computes a small matrix product, with which tiles. Importable without Triton."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """A matrix-vector product without tensor cores, for one to four tokens.

    Attributes:
        rows: weight rows of a program; a power of two.
        block_k: elements of a row that are loaded at once; a power of two. With 256 for each warp or a multiple of
            it, the activations load in the layout of the weights; with less they pass through shared memory.
        warps: warps of a program.
    """

    rows: int
    block_k: int
    warps: int


@dataclass(frozen=True, slots=True)
class SplitKConfig:
    """A product on tensor cores whose inner dimension is divided among programs.

    Attributes:
        block_n: weight rows of a tile, the M of the matrix instruction; a power of two, 64 or more.
        block_m: tokens of a tile, the N of the matrix instruction; a power of two, 16 or more.
        block_k: elements of the inner dimension that are loaded at once; a power of two.
        parts: programs that share the inner dimension of a tile.
        warps: warps of a program.
        stages: loads in flight ahead of the product.
    """

    block_n: int
    block_m: int
    block_k: int
    parts: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Bytes of shared memory that the loads in flight take."""
        return (self.block_n + self.block_m) * self.block_k * itemsize * self.stages


GemmChoice: TypeAlias = GemvConfig | SplitKConfig | None
"""What computes a product; None is the library (cuBLAS)."""

_KINDS: dict[str, type[GemvConfig] | type[SplitKConfig]] = {"gemv": GemvConfig, "split_k": SplitKConfig}


def encode_choice(choice: GemmChoice) -> list[str | int]:
    """A choice as JSON: ``["cublas"]``, ``["gemv", rows, block_k, warps]`` or ``["split_k", block_n, …]``."""
    if choice is None:
        return ["cublas"]
    return ["gemv" if isinstance(choice, GemvConfig) else "split_k", *astuple(choice)]


def decode_choice(entry: list[str | int]) -> GemmChoice:
    """The choice that :func:`encode_choice` gave.

    Raises:
        ValueError: not a choice.
    """
    match entry:
        case ["cublas"]:
            return None
        case [str(kind), *numbers] if kind in _KINDS and all(type(n) is int and n > 0 for n in numbers):
            try:
                return _KINDS[kind](*numbers)  # type: ignore[arg-type]
            except TypeError:
                pass
    raise ValueError(f"not a choice of a matrix product: {entry!r}")
