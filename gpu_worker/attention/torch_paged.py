"""Paged attention in plain torch operations: one path for prefill, chunks and decode.

Every span becomes batched matrix products in float32 over the gathered context,

    scores = q @ k.T * scale + mask        q [N, M, head_dim], k and v [N, C, head_dim]
    output = softmax(scores) @ v           N: spans x kv heads, M: query tokens x heads of a group

so that the heads that share keys are rows of one product. Decode spans of similar context form one batch; a longer
span is cut into tiles of query tokens, each of which looks only as far as its last token.

C is a multiple of ``LANES`` (the softmax sums in that many lanes), and the product with v is summed in slices of
``SLICE`` tokens, in order, where masked tokens add zeros. In the batch-invariant mode all products are of ``ROWS`` x
``SLICE`` scores, because matrix libraries choose the order of a sum by the shape, each by rules of its own: then a
token's output is the same bits in any batch, tile and padding. Rows within a product may differ where there are eight
of them (MKL without AVX-512), but not where there are 16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Unpack

import numpy as np
import torch
import torch.nn.functional as F

from gpu_worker.attention.base import AttentionShape, BackendOptions, Int64, KVScales, Spans
from gpu_worker.layers.norm import HeadNorm
from gpu_worker.layers.rotary import apply_rotary

LANES = 16
ROWS, SLICE = 16, 128
TILE = 128
"""Query tokens of a tile at most."""
SCORE_BYTES = 32 * 2**20
"""Size of one product's scores at most."""
GATHER_BYTES = 3 * 2**20
"""Size of the gathered context of a decode batch at most, unless one span alone is larger: it should stay in cache."""
MASKED = float("-inf")
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[N, M, n] of [N, M, k] and [N, k, n]."""


@dataclasses.dataclass(slots=True)
class Tile:
    """Query tokens ``first`` to ``last`` of a group and the context that they see."""

    first: int
    last: int
    context: int
    mask: torch.Tensor
    """[N or 1, M or 1, context] float32: 0 where a query sees a token, else minus infinity."""


@dataclasses.dataclass(slots=True)
class Group:
    """Spans whose context is gathered together: a batch of decodes, or one longer span."""

    gather: torch.Tensor
    """[2 * spans * kv_heads * blocks] rows of the cache as [blocks * 2 * kv_heads, block_size * head_dim]."""
    num_spans: int
    padded: int
    """Context of the gathered tensors."""
    rows: slice | torch.Tensor
    """Its tokens among those of the step."""
    is_decode: bool
    """One query token for each span; else all tokens are of one span."""
    positions: torch.Tensor
    """[tokens] int64."""
    tiles: dict[int | None, list[Tile]]
    """By window."""


@dataclasses.dataclass(slots=True)
class Metadata:
    write_rows: torch.Tensor
    """[tokens * 2 * kv_heads] rows of the cache as [blocks * 2 * kv_heads * block_size, head_dim]."""
    groups: list[Group]


class TorchPagedAttention:
    """See the module. One layer's cache is [blocks, 2, kv_heads, block_size, head_dim], keys first."""

    def __init__(self, shape: AttentionShape, device: torch.device, **options: Unpack[BackendOptions]) -> None:
        """For caches of any dtype, rows and contexts: a step takes the memory that it needs."""
        self.shape, self.device, self.dtype = shape, device, options["dtype"]
        self.group_size = shape.num_heads // shape.num_kv_heads
        self.rotated_heads = shape.num_heads + shape.num_kv_heads
        self.query_size = shape.num_heads * shape.head_dim
        self._unit = SLICE if shape.batch_invariant else LANES
        """What contexts are padded to."""
        self._attend = _attend_invariantly if shape.batch_invariant else _attend
        heads = torch.arange(2 * shape.num_kv_heads, device=device)
        self._kv_heads = heads
        self._block_multiple = math.lcm(self._unit, shape.block_size) // shape.block_size

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        shape = self.shape
        return (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)

    # -- once a step -------------------------------------------------------------------------------------------------

    def prepare(
        self, spans: Spans, block_tables: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Metadata:
        size = self.shape.block_size
        starts = np.cumsum(spans.counts) - spans.counts
        blocks, offsets = slot_mapping // size, slot_mapping % size
        write_rows = ((blocks[:, None] * len(self._kv_heads) + self._kv_heads) * size + offsets[:, None]).view(-1)
        groups = []
        for batch in self._decode_batches(spans):
            first, last = int(starts[batch[0]]), int(starts[batch[-1]])
            in_a_row = last - first == len(batch) - 1
            rows = slice(first, last + 1) if in_a_row else torch.from_numpy(starts[batch]).to(self.device)
            groups.append(self._group(spans, batch, block_tables, positions, rows, is_decode=True))
        for index in np.flatnonzero(spans.counts > 1):
            rows = slice(int(starts[index]), int(starts[index] + spans.counts[index]))
            groups.append(self._group(spans, np.array([index]), block_tables, positions, rows, is_decode=False))
        return Metadata(write_rows, groups)

    def _decode_batches(self, spans: Spans) -> list[Int64]:
        """The spans of one token, so that none is padded to much more than twice its context, in batches that stay in
        the cache."""
        single = np.flatnonzero(spans.counts == 1)
        if not len(single):
            return []
        shape = self.shape
        blocks = -(-spans.contexts[single] // shape.block_size)
        buckets = np.ceil(np.log2(np.maximum(blocks, 16))).astype(np.int64)
        batches: list[Int64] = []
        for bucket in np.unique(buckets):
            members = single[buckets == bucket]
            context = int(blocks[buckets == bucket].max()) * shape.block_size
            at_most = max(1, GATHER_BYTES // (2 * shape.num_kv_heads * context * shape.head_dim * 4))
            batches += np.array_split(members, -(-len(members) // at_most))
        return batches

    def _group(
        self,
        spans: Spans,
        batch: Int64,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        rows: slice | torch.Tensor,
        *,
        is_decode: bool,
    ) -> Group:
        size, multiple = self.shape.block_size, self._block_multiple
        num_blocks = -(-int(spans.contexts[batch].max()) // size)
        num_blocks = -(-num_blocks // multiple) * multiple
        slots = torch.from_numpy(spans.slots[batch]).to(self.device)
        width = block_tables.shape[1]
        table = block_tables[slots, : min(num_blocks, width)].long()
        if num_blocks > width:
            table = F.pad(table, (0, num_blocks - width))
        heads = self._kv_heads.view(2, 1, -1, 1)
        gather = (table[None, :, None, :] * len(self._kv_heads) + heads).reshape(-1)
        return Group(gather, len(batch), num_blocks * size, rows, is_decode, positions[rows], {})

    def _tiles(self, group: Group, window: int | None) -> list[Tile]:
        """The tiles of a group, made when the first layer with this window asks."""
        tiles = group.tiles.get(window)
        if tiles is None:
            tiles = [self._decode_tile(group, window)] if group.is_decode else self._span_tiles(group, window)
            group.tiles[window] = tiles
        return tiles

    def _decode_tile(self, group: Group, window: int | None) -> Tile:
        mask = self._mask(group.positions, group.padded, window)
        return Tile(0, group.num_spans, group.padded, mask.repeat_interleave(self.shape.num_kv_heads, 0)[:, None, :])

    def _span_tiles(self, group: Group, window: int | None) -> list[Tile]:
        tiles, count, start = [], len(group.positions), int(group.positions[0])
        step = max(1, min(TILE, SCORE_BYTES // (4 * self.shape.num_heads * group.padded)))
        for first in range(0, count, step):
            last = min(first + step, count)
            context = min(group.padded, -(-(start + last) // self._unit) * self._unit)
            mask = self._mask(group.positions[first:last], context, window)
            tiles.append(Tile(first, last, context, mask.repeat_interleave(self.group_size, 0)[None]))
        return tiles

    def _mask(self, positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
        tokens = torch.arange(context, device=self.device)
        hidden = tokens > positions[:, None]
        if window is not None:
            hidden |= tokens <= positions[:, None] - window
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, MASKED)

    # -- once a layer ------------------------------------------------------------------------------------------------

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
        scales: KVScales,
    ) -> torch.Tensor:
        """The query is float32."""
        num_heads, head_dim = self.shape.num_heads, self.shape.head_dim
        heads = qkv[:, : self.rotated_heads * head_dim].view(-1, self.rotated_heads, head_dim)
        exact = heads.float()
        if head_norm is not None:
            exact = head_norm(exact)
        rotated = apply_rotary(exact, cos, sin)
        if cache.dtype == qkv.dtype:
            heads[:, num_heads:].copy_(rotated[:, num_heads:])
            key_value = qkv[:, self.query_size :].reshape(-1, head_dim)
            cache.view(-1, head_dim).index_copy_(0, metadata.write_rows, key_value)
        else:
            values = qkv[:, self.rotated_heads * head_dim :].view(len(qkv), -1, head_dim)
            key_value = _as_stored(rotated[:, num_heads:], values, cache.dtype, scales)
            # torch has no index_copy_ of float8 on a CPU.
            cache.view(-1, head_dim)[metadata.write_rows] = key_value
        return rotated[:, :num_heads]

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
        scale: float,
        window: int | None,
        scales: KVScales,
    ) -> torch.Tensor:
        shape, scale = self.shape, scale * scales.key
        heads = query.reshape(-1, shape.num_kv_heads, self.group_size, shape.head_dim)
        output = torch.empty(heads.shape, dtype=self.dtype, device=cache.device)
        block_rows = cache.view(-1, shape.block_size * shape.head_dim)
        for group in metadata.groups:
            gathered = block_rows.index_select(0, group.gather).float()
            keys, values = gathered.view(2, group.num_spans * shape.num_kv_heads, group.padded, shape.head_dim)
            if scales.value != 1.0:
                values.mul_(scales.value)
            queries, tiles = heads[group.rows], self._tiles(group, window)
            if group.is_decode:
                output[group.rows] = self._decode(queries, keys, values, tiles[0], scale).to(output.dtype)
                continue
            results = output[group.rows]
            for tile in tiles:
                some = slice(tile.first, tile.last)
                results[some] = self._span(queries[some], keys, values, tile, scale)
        return output.view(len(query), -1)

    def _decode(
        self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, scale: float
    ) -> torch.Tensor:
        """[spans, kv_heads, group, head_dim] of one query token each."""
        query = heads.reshape(-1, self.group_size, self.shape.head_dim)
        return self._attend(query, keys, values, tile.mask, scale).view(heads.shape)

    def _span(
        self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, scale: float
    ) -> torch.Tensor:
        """[tokens, kv_heads, group, head_dim] of consecutive tokens of one span."""
        tokens, kv_heads, group, head_dim = heads.shape
        query = heads.transpose(0, 1).reshape(kv_heads, tokens * group, head_dim)
        output = self._attend(query, keys[:, : tile.context], values[:, : tile.context], tile.mask, scale)
        return output.view(kv_heads, tokens, group, head_dim).transpose(0, 1)


def _as_stored(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, scales: KVScales) -> torch.Tensor:
    """Rows of the cache in ``dtype``, from keys (float32) and values, [tokens, kv_heads, head_dim].

    Rounded once. What is too large becomes the largest number of the type, as on a GPU.
    """
    both = torch.stack([keys / scales.key, values.float() / scales.value], 1)
    limit = torch.finfo(dtype).max
    return both.clamp_(-limit, limit).to(dtype).view(-1, keys.shape[-1])


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """The two products: query [N, M, d], keys and values [N, C, d], mask broadcast to [N, M, C], all float32."""
    probabilities = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale).softmax(-1)
    return _weighted(torch.bmm, probabilities, values)


def _attend_invariantly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """As ``_attend``, in products of one shape; C is a multiple of ``SLICE``."""
    rows = query.shape[1]
    if missing := -rows % ROWS:
        query = F.pad(query, (0, 0, 0, missing))
        mask = F.pad(mask, (0, 0, 0, missing)) if mask.shape[1] > 1 else mask
    scores = torch.cat([_in_equal_products(query, some.transpose(1, 2)) for some in torch.split(keys, SLICE, 1)], -1)
    probabilities = scores.mul_(scale).add_(mask).softmax(-1)
    return _weighted(_in_equal_products, probabilities, values)[:, :rows].contiguous()


def _weighted(product: Product, probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The second product, [N, M, d], summed slice by slice."""
    parts = zip(torch.split(probabilities, SLICE, -1), torch.split(values, SLICE, 1), strict=True)
    output = product(*next(parts))
    for part in parts:
        output += product(*part)
    return output


def _in_equal_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[N, M, n] of left [N, M, k] and right [N, k, n], in products of ``ROWS`` rows."""
    if left.shape[1] == ROWS:
        return _for_all_threads(left, right)
    blocks = torch.unflatten(left, 1, (-1, ROWS))
    products = [_for_all_threads(some, one.expand(len(some), -1, -1)) for some, one in zip(blocks, right, strict=True)]
    return torch.stack(products).flatten(1, 2)


def _for_all_threads(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The products of matrices, and so many again that no thread lacks one: they would be divided among threads."""
    times = -(-torch.get_num_threads() // len(left))
    if times == 1:
        return torch.bmm(left, right)
    return torch.bmm(left.repeat(times, 1, 1), right.repeat(times, 1, 1))[: len(left)]
