"""The interface of a source of weights. Imports no torch: reading begins while torch loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from gpu_worker.loading.progress import Progress
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

    progress: Progress

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
