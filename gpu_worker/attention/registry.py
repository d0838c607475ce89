"""The table of attention backends."""

from __future__ import annotations

import importlib
from typing import Unpack

import torch

from gpu_worker.attention.base import AttentionShape, BackendOptions, PagedAttention
from shared.errors import StartupError

BACKENDS = {
    "torch_paged": "gpu_worker.attention.torch_paged:TorchPagedAttention",
    "triton_paged": "gpu_worker.attention.triton_paged:TritonPagedAttention",
}
DEFAULT_OF_DEVICE = {"cpu": "torch_paged", "cuda": "triton_paged"}


def make_backend(
    shape: AttentionShape, device: torch.device, name: str | None = None, **options: Unpack[BackendOptions]
) -> PagedAttention:
    """Make the backend ``name``, or the default of the device's type, as ``PagedAttention`` says.

    Raises:
        StartupError: no such backend.
    """
    name = name or DEFAULT_OF_DEVICE.get(device.type)
    if name not in BACKENDS:
        raise StartupError(f"no attention backend {name!r} for {device.type}; there are {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    kind: type[PagedAttention] = getattr(importlib.import_module(module), attribute)
    return kind(shape, device, **options)
