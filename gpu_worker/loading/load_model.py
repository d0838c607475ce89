"""From weights to a model that can run."""

from __future__ import annotations

import torch

from gpu_worker.attention.base import PagedAttention
from gpu_worker.loading.dummy_weights import DummyWeights
from gpu_worker.loading.gguf_weights import GgufWeights
from gpu_worker.loading.weights import Weights
from gpu_worker.models.base import Builder, CausalLM
from gpu_worker.models.registry import model_class
from shared.model_config import ModelConfig


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    weights: Weights,
    backend: PagedAttention,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> CausalLM:
    """Build the model of ``config`` and close ``weights``.

    Raises:
        StartupError: an unknown architecture, or a tensor that is missing or has another shape.
    """
    try:
        cls = model_class(config.architecture)
        if isinstance(weights, GgufWeights):
            weights.names = cls.gguf_names
        elif isinstance(weights, DummyWeights):
            weights.place(dtype, device)
        return cls(Builder(config, weights, backend, dtype, device, batch_invariant))
    finally:
        weights.close()
