"""What an attention backend does, and what a step tells it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.layers.norm import HeadNorm

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


class KVScales(NamedTuple):
    """What a layer's keys and values in the cache are multiplied by when they are read; they are written divided by it.

    They are 1 unless the cache is of an 8-bit type.
    """

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """The query spans of one step, in the order of their tokens. All arrays have one entry for each span."""

    slots: Int64
    counts: Int64
    """Query tokens."""
    contexts: Int64
    """Tokens that the last query token sees, itself included. Known to the host before the step runs."""


class BackendOptions(TypedDict):
    """What a backend is made for, beside a shape and a device."""

    dtype: torch.dtype
    """Of the model."""
    cache_dtype: torch.dtype
    """Of the KV cache."""
    max_rows: int
    """Decode rows of a step at most, padding included."""
    max_context: int
    """Tokens of a row's context at most."""


class PagedAttention(Protocol):
    """What layers need of a backend: it writes keys and values into the paged cache and attends over it.

    ``metadata`` is the backend's own, of one step; how it is made depends on the runner that the backend is for.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, **options: Unpack[BackendOptions]) -> None: ...

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache; its first dimension is the block."""

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        scales: KVScales,
    ) -> torch.Tensor:
        """Normalise and rotate q and k in float32, and store k and v in a layer's cache.

        Args:
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all heads of q, then of k, then of v; it may be
                overwritten.
            head_norm: QK-norm, or None.
            cos: [tokens, 1, rotary_dim] float32.
            sin: [tokens, 1, rotary_dim] float32, negative in the first half.
            scales: of the layer.

        Returns:
            The query for ``attend``.
        """

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        scale: float,
        window: int | None,
        scales: KVScales,
    ) -> torch.Tensor:
        """Causal attention over each span's context.

        Args:
            query: [tokens, num_heads, head_dim], from ``rotate_and_write``.
            window: positions that a token sees, itself included; None: all before it.
            scales: those that the cache was written with.

        Returns:
            [tokens, num_heads * head_dim], of the model's dtype.
        """


class AttentionBackend(PagedAttention, Protocol):
    """A backend whose steps are prepared from spans that the host knows.

    ``prepare`` runs once a step and does all index arithmetic; the rest runs once a layer.
    """

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
