"""What a model is to the runner, and what it is built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from gpu_worker.attention.base import PagedAttention
from gpu_worker.forward_context import ForwardContext
from gpu_worker.layers.linear import LinearLayer, make_linear
from gpu_worker.loading.weights import GgufNames, Weights
from shared.model_config import ModelConfig


class CausalLM(Protocol):
    """A causal language model."""

    gguf_names: ClassVar[GgufNames]

    def __init__(self, builder: Builder) -> None: ...

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states after the last norm, [tokens, hidden] in the model's dtype, of ``token_ids`` [tokens]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] float32 of some rows of ``forward``'s result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Builder:
    """What a model's constructor takes its parts from.

    The model asks for its tensors by their checkpoint names; a missing one, or one of another shape, is a
    ``StartupError`` that names it.
    """

    config: ModelConfig
    weights: Weights
    backend: PagedAttention
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor in the model's dtype, on its device."""
        return self.weights.take(name, shape).to(self.device, self.dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, float32."""
        return self.weights.take(name, (size,)).to(self.device, torch.float32)

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool) -> LinearLayer:
        """One layer of several checkpoint projections, one below the other.

        Args:
            names: without ``.weight`` and ``.bias``.
        """
        parts = [self.tensor(f"{n}.weight", o, in_features) for n, o in zip(names, out_features, strict=True)]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        offsets = [self.tensor(f"{n}.bias", o) for n, o in zip(names, out_features, strict=True)] if bias else None
        return make_linear(weight, torch.cat(offsets) if offsets else None, batch_invariant=self.batch_invariant)
