"""What one step's forward pass hands to every layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(slots=True)
class ForwardContext:
    """Made by the runner, once a step."""

    kv_cache: torch.Tensor
    """[layers, blocks, ...] in the attention backend's layout."""
    attention: Any
    """The backend's own metadata."""
    cos: torch.Tensor
    """[tokens, 1, rotary_dim] float32; a token's row is contiguous."""
    sin: torch.Tensor
    """[tokens, 1, rotary_dim] float32, negative in the first half."""
