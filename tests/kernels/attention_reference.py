"""Paged caches with random content, and attention over them in plain torch."""

from __future__ import annotations

import dataclasses

import torch

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies the bits of bfloat16 matrices as integers."""


@dataclasses.dataclass
class Paged:
    """A cache whose slots hold contexts of given lengths, in shuffled blocks; what belongs to nobody is NaN."""

    cache: torch.Tensor
    """[blocks, 2, kv_heads, block_size, head_dim]."""
    block_tables: torch.Tensor
    """[slots, max_blocks] int32."""

    def context(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a slot, [length, kv_heads, head_dim] float32 each."""
        block_size = self.cache.shape[3]
        blocks = self.block_tables[slot, : -(-length // block_size)].long()
        gathered = self.cache[blocks].float().permute(1, 0, 3, 2, 4).flatten(1, 2)
        return gathered[0, :length], gathered[1, :length]


def make_paged(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Paged:
    """Random keys and values for slots with these contexts."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(counts)
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    tables = torch.zeros(len(lengths), max(counts, default=0) + 1, dtype=torch.int32)
    shape = (num_blocks, 2, kv_heads, block_size, head_dim)
    cache = torch.randn(shape, generator=generator)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    taken = 0
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[slot, :count] = order[taken : taken + count].int()
        positions = torch.arange(length)
        used[tables[slot, positions // block_size].long(), positions % block_size] = True
        taken += count
    cache.permute(0, 3, 1, 2, 4)[~used] = float("nan")
    return Paged(cache.to(dtype).to(device), tables.to(device))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of queries at the end of a context, in float32.

    Args:
        query: [tokens, heads, head_dim].
        keys: [context, kv_heads, head_dim]; values: the same.

    Returns:
        [tokens, heads, head_dim] float32.
    """
    tokens, heads, _ = query.shape
    context, kv_heads, _ = keys.shape
    keys, values = (x.repeat_interleave(heads // kv_heads, 1).float() for x in (keys, values))
    scores = torch.einsum("thd,chd->htc", query.float(), keys) * scale
    position = torch.arange(context - tokens, context, device=query.device)[:, None]
    token = torch.arange(context, device=query.device)
    hidden = token > position
    if window is not None:
        hidden |= token <= position - window
    return torch.einsum("htc,chd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Of results near 1 whose inputs are exact in ``dtype``."""
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}


@dataclasses.dataclass
class Rows:
    """Decode rows, each of a slot."""

    paged: Paged
    lengths: list[int]
    query: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor

    def expected(self, scale: float, window: int | None = None) -> torch.Tensor:
        rows = []
        for row, length in enumerate(self.lengths):
            keys, values = self.paged.context(int(self.slots[row]), length)
            result = attend(self.query[row : row + 1], keys, values, scale, window)
            rows.append(result if length else torch.zeros_like(result))
        return torch.cat(rows)
