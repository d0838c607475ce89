"""Measures the matrix products of a model on this machine's GPU, for kernels of later starts to be chosen by."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from gpu_worker.attention.base import AttentionShape
from gpu_worker.attention.registry import make_backend
from gpu_worker.device import select_device, select_dtype
from gpu_worker.layers.cuda_linear import CudaLinear
from gpu_worker.layers.gemm_choice import GemmShape
from gpu_worker.layers.gemm_tuning import tune
from gpu_worker.loading.dummy_weights import DummyWeights
from gpu_worker.loading.load_model import load_model
from shared.model_config import ModelConfig

STEP_S = 10.0
BLOCK_SIZE = 16


def tune_model(config: ModelConfig, dtype_name: str, seconds: float) -> Iterator[int]:
    """Measure what is not known yet, for so many seconds; yields how many products have been measured, now and then.

    Args:
        dtype_name: of ``--dtype``.

    Raises:
        StartupError: there is no GPU, or the model is not supported.
    """
    device = select_device("cuda")
    shapes = product_shapes(config, select_dtype(dtype_name, config, device), device)
    end = time.monotonic() + seconds
    total = 0
    while (left := end - time.monotonic()) > 0 and (count := tune(shapes, device, seconds=min(STEP_S, left))):
        total += count
        yield total


def product_shapes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list[GemmShape]:
    """The shapes of the products of one layer and of the projection to the vocabulary, each once."""
    config = dataclasses.replace(config, num_layers=1)
    attention = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
    backend = make_backend(attention, device, dtype=dtype, cache_dtype=dtype, max_rows=1, max_context=BLOCK_SIZE)
    model = load_model(config, DummyWeights(0), backend, dtype, device, batch_invariant=False)
    return list(dict.fromkeys(layer.shape for layer in _products(model, set())))


def _products(part: object, seen: set[int]) -> Iterator[CudaLinear]:
    """The layers in ``part`` and in all that it is made of."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, CudaLinear):
        yield part
    elif isinstance(part, list):
        for each in part:
            yield from _products(each, seen)
    elif type(part).__module__.startswith("gpu_worker."):
        for each in getattr(part, "__dict__", {}).values():
            yield from _products(each, seen)
