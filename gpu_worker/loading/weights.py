"""The interface of a source of weights. Imports no torch: reading begins while torch loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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

    def find(self, name: str) -> torch.Tensor | None:
        """A small tensor that a checkpoint may do without, of whatever shape it has; None: it is not there."""

    def stack(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Tensors one below the other in a tensor of ``dtype`` on ``device``, whose contents may come until ``finish``.

        Args:
            shapes: of each; they differ in the first dimension alone.

        Raises:
            StartupError: as of ``take``.
        """

    def finish(self) -> None:
        """Wait until everything that was asked for is there.

        Raises:
            StartupError: a file cannot be read; the text names it and the tensor.
        """

    def close(self) -> None:
        """Release the files, whatever is still to come; finish the progress bar."""


def stack_taken(
    weights: Weights,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """``Weights.stack`` of whole tensors, taken one by one."""
    parts = [weights.take(name, shape).to(device, dtype) for name, shape in zip(names, shapes, strict=True)]
    if len(parts) == 1:
        return parts[0]
    import torch

    return torch.cat(parts)


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
