"""What a model is to the runner, and what it is built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from gpu_worker.attention.base import KVScales, PagedAttention
from gpu_worker.forward_context import ForwardContext
from gpu_worker.layers.linear import LinearLayer, make_linear
from gpu_worker.layers.mlp import make_gated_linear
from gpu_worker.loading.kv_scales import KEY_NAMES, VALUE_NAMES, find_scale
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
    has_kv_scales: bool = False
    """The KV cache is of an 8-bit type."""
    unscaled: list[str] = dataclasses.field(default_factory=list)
    """Layers, by the prefix of their attention, that have such a cache and no scale for keys or for values."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor in the model's dtype, on its device. Its contents may come until the model is complete."""
        return self.weights.stack([name], [shape], self.dtype, self.device)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, float32."""
        return self.weights.take(name, (size,)).to(self.device, torch.float32)

    def kv_scales(self, prefix: str) -> KVScales:
        """The scales of a layer's keys and values in the KV cache: the checkpoint's, or 1.

        Args:
            prefix: of the layer's attention, with its dot.
        """
        if not self.has_kv_scales:
            return KVScales()
        key, value = (find_scale(self.weights, prefix, names) for names in (KEY_NAMES, VALUE_NAMES))
        if key is None or value is None:
            self.unscaled.append(prefix)
        return KVScales(1.0 if key is None else key, 1.0 if value is None else value)

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool) -> LinearLayer:
        """One layer of several checkpoint projections, one below the other.

        The contents of its weight may come until the model is complete.

        Args:
            names: without ``.weight`` and ``.bias``.
        """
        weight = self._stack(names, ".weight", [(size, in_features) for size in out_features])
        offset = self._stack(names, ".bias", [(size,) for size in out_features]) if bias else None
        return make_linear(weight, offset, batch_invariant=self.batch_invariant)

    def gated_linear(self, gate: str, up: str, size: int, in_features: int, bias: bool) -> LinearLayer:
        """``silu(gate(x)) * up(x)`` of two checkpoint projections to ``size`` features each, as ``linear`` makes them.

        Args:
            gate: its name without ``.weight`` and ``.bias``.
            up: likewise.
        """
        weight = self._stack((gate, up), ".weight", [(size, in_features)] * 2)
        offset = self._stack((gate, up), ".bias", [(size,)] * 2) if bias else None
        return make_gated_linear(weight, offset, batch_invariant=self.batch_invariant)

    def _stack(self, names: Sequence[str], suffix: str, shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return self.weights.stack([name + suffix for name in names], shapes, self.dtype, self.device)
