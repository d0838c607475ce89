"""The interface of a source of weights, and its progress bar. Imports no torch: reading begins while torch loads."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from shared.errors import StartupError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class GgufNames:
    """How a GGUF file spells the tensors of an architecture, and how it stores them."""

    top: Mapping[str, str]
    """Tensors outside the layers: checkpoint name to GGUF name, both without ``.weight``."""
    layer: Mapping[str, str]
    """Tensors of a layer, below ``model.layers.N.`` and ``blk.N.``."""
    interleaved: tuple[str, ...] = ()
    """Layer tensors whose rows pair element 2i with 2i+1 of a head for RoPE; ours pair i with i + head_dim/2."""

    def find(self, name: str) -> tuple[str, bool]:
        """The GGUF name of a checkpoint tensor, and whether its rows are interleaved."""
        stem, _, suffix = name.rpartition(".")
        if not stem.startswith("model.layers."):
            return f"{self.top.get(stem, stem)}.{suffix}", False
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{self.layer.get(part, part)}.{suffix}", part in self.interleaved


class Weights(Protocol):
    """A checkpoint. Tensors are taken once each, by the names of transformers."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, of the checkpoint's dtype (float32 for quantized ones).

        Raises:
            StartupError: it is missing, or has another shape; the text names it.
        """

    def close(self) -> None:
        """Release the files; finish the progress bar."""


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str) -> None:
    """Refuse a tensor of another shape than the configuration says."""
    if tuple(found) != tuple(wanted):
        raise StartupError(
            f"the tensor {name} in {where} has the shape {list(found)}, but the model's configuration asks for "
            f"{list(wanted)}"
        )


def missing(name: str, where: str) -> StartupError:
    """The error for a tensor that is not there."""
    return StartupError(f"the tensor {name} is missing in {where}; is the checkpoint complete?")


class Progress:
    """A bar over the bytes of a checkpoint, on standard error, from the first tensor on."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._bar: tqdm[Any] | None = None

    def update(self, nbytes: int) -> None:
        """So many more bytes are loaded."""
        if self._bar is None:
            self._bar = tqdm(
                total=self.total_bytes,
                desc="loading weights",
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                mininterval=0.2,
            )
        self._bar.update(nbytes)

    def close(self) -> None:
        """Finish the bar; tensors that the model did not ask for count as loaded."""
        if self._bar is not None:
            self._bar.update(self.total_bytes - self._bar.n)
            self._bar.close()
