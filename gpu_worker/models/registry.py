"""The table of model architectures."""

from __future__ import annotations

import importlib

from gpu_worker.models.base import CausalLM
from shared.errors import StartupError

MODELS = {
    "llama": "gpu_worker.models.llama:LlamaForCausalLM",
    "qwen2": "gpu_worker.models.qwen2:Qwen2ForCausalLM",
    "qwen3": "gpu_worker.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class that builds models of ``architecture`` (transformers' model_type).

    Raises:
        StartupError: no such architecture.
    """
    if architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise StartupError(f"the model architecture {architecture!r} is not supported; there are {known}")
    module, _, attribute = MODELS[architecture].partition(":")
    cls: type[CausalLM] = getattr(importlib.import_module(module), attribute)
    return cls
