"""Which source of weights a model has. Imports no torch."""

from __future__ import annotations

from gpu_worker.loading.dummy_weights import DummyWeights
from gpu_worker.loading.gguf_weights import GgufWeights
from gpu_worker.loading.safetensors_weights import SafetensorsWeights
from gpu_worker.loading.weights import Weights
from shared.errors import StartupError
from shared.model_config import ModelConfig
from shared.model_source import ModelSource


def open_weights(
    source: ModelSource, config: ModelConfig, load_format: str, seed: int, *, read_ahead: bool = False
) -> Weights:
    """Open the weights of ``source``; a GGUF file begins to be read at once.

    Args:
        read_ahead: safetensors files, too, begin to be read, into the page cache.

    Raises:
        StartupError: a file is missing or cannot be read.
    """
    if load_format == "dummy":
        return DummyWeights(seed)
    if source.kind == "config":
        raise StartupError(f"{source.path} is a configuration without weights; add --load-format dummy for random ones")
    if source.kind == "gguf":
        return GgufWeights(source.path, config.head_dim)
    return SafetensorsWeights(source.path, read_ahead=read_ahead)
