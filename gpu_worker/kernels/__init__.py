"""Triton kernels with thin launchers, for tensors on a GPU. Importing the package itself does not import triton.

Launchers do not wait for the device and read no value from it, so that a CUDA graph can capture them; what they
allocate comes from ``torch.empty``.
"""

from __future__ import annotations

import torch


def uses_kernels(device: torch.device) -> bool:
    """Whether layers on ``device`` are made of these kernels; plain torch operations elsewhere."""
    return device.type == "cuda"
