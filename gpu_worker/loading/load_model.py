"""From weights to a model that can run."""

from __future__ import annotations

import contextlib

import torch

from gpu_worker.attention.base import PagedAttention
from gpu_worker.loading.dummy_weights import DummyWeights
from gpu_worker.loading.gguf_weights import GgufWeights
from gpu_worker.loading.safetensors_weights import SafetensorsWeights
from gpu_worker.loading.staged_copies import StagedCopies
from gpu_worker.loading.weights import Weights
from gpu_worker.models.base import Builder, CausalLM
from gpu_worker.models.registry import model_class
from shared.logging import get_logger
from shared.model_config import ModelConfig


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    weights: Weights,
    backend: PagedAttention,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    cache_dtype: torch.dtype | None = None,
    *,
    wait: bool = True,
) -> CausalLM:
    """Build the model of ``config`` and close ``weights``.

    Args:
        cache_dtype: of the KV cache; None: the model's.
        wait: False: the contents of the model's tensors may come until ``weights.finish()``, which is left to the
            caller as is ``weights.close()``.

    Raises:
        StartupError: an unknown architecture, or a tensor that is missing or has another shape.
    """
    with contextlib.closing(weights) if wait else contextlib.nullcontext():
        cls = model_class(config.architecture)
        if isinstance(weights, GgufWeights):
            weights.names = cls.gguf_names
        elif isinstance(weights, DummyWeights):
            weights.place(dtype, device)
        elif isinstance(weights, SafetensorsWeights) and device.type != "cpu":
            weights.stage(StagedCopies(device, weights.progress.update))
        is_scaled = (cache_dtype or dtype).itemsize == 1
        builder = Builder(config, weights, backend, dtype, device, batch_invariant, is_scaled)
        model = cls(builder)
        if builder.unscaled:
            get_logger().warning(
                "the checkpoint lacks scales for the KV cache: 1.0 is used, and keys and values above 448 are cut off",
                layers=len(builder.unscaled),
                first=builder.unscaled[0],
            )
        if wait:
            weights.finish()
        return model
