"""What an attention backend does, and what a step tells it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape that all attention layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    batch_invariant: bool = False
    """A token's output must be the same bits in any batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """The query spans of one step, in the order of their tokens. All arrays have one entry for each span."""

    slots: Int64
    counts: Int64
    """Query tokens."""
    contexts: Int64
    """Tokens that the last query token sees, itself included. Known to the host before the step runs."""


class AttentionBackend(Protocol):
    """Writes keys and values into the paged cache and attends over it.

    ``prepare`` runs once a step and does all index arithmetic; ``write`` and ``attend`` run once a layer.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None: ...

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache; its first dimension is the block."""

    def prepare(
        self, spans: Spans, block_tables: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        """Make what the layers of one step need.

        Args:
            spans: the step's query spans.
            block_tables: [slots, max_blocks] int32 on the device.
            positions: [tokens] int64 on the device.
            slot_mapping: [tokens] int64, ``block * block_size + offset`` of each token.
        """

    def write(self, cache: torch.Tensor, key_value: torch.Tensor, metadata: Any) -> None:
        """Store keys and values in a layer's cache.

        Args:
            key_value: [tokens, 2 * num_kv_heads * head_dim], keys first; may be strided.
        """

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention over each span's context.

        Args:
            query: [tokens, num_heads, head_dim] float32; may be strided.
            window: positions that a token sees, itself included; None: all before it.

        Returns:
            [tokens, num_heads * head_dim], of the cache's dtype.
        """
