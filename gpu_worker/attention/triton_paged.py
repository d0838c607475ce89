"""Paged attention in Triton kernels: prefill spans by tiles, decode rows by a division made on the device.

On Hopper a kernel of its own computes prefills of 16-bit caches, but for layers with windows.

A step's decode rows need nothing on the host, so that a CUDA graph can hold ``prepare_decode`` and all layers; their
contexts may differ at each replay, and so may what they have in common. Keys and values are in the cache before
``attend`` runs (``kernels.rope_kv``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Unpack

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.attention.base import AttentionShape, BackendOptions, KVScales
from gpu_worker.kernels.attention_plan import DecodePlan, make_decode_plan, plan_decode
from gpu_worker.kernels.paged_decode import (
    DecodeConfig,
    DecodeWorkspace,
    decode,
    decode_config,
    make_decode_workspace,
)
from gpu_worker.kernels.paged_prefill import PrefillConfig, make_prefill_workspace, prefill, prefill_config
from gpu_worker.kernels.prefill_plan import TileCut, has_pieces, prefill_items
from gpu_worker.kernels.prefix_pass import (
    PrefixConfig,
    PrefixTables,
    PrefixWorkspace,
    attend_prefixes,
    make_prefix_workspace,
    prefix_config,
)
from gpu_worker.kernels.rope_kv import rotate_and_write
from gpu_worker.layers.norm import HeadNorm
from gpu_worker.shared_prefix import PrefixLayout
from shared.logging import get_logger

log = get_logger()
Int32 = npt.NDArray[np.int32]

SPLIT_TOKENS = 1024
"""Of a unit in the batch-invariant mode, unless a context has more than ``MAX_SPLITS`` of them."""
MAX_SPLITS = 16
HOPPER = 9
"""Major compute capability."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillItems:
    """How a step's prefill spans are cut; made on the host before the step is staged."""

    table: Int32 | None
    """Of ``prefill_plan.prefill_items``; the caller copies it to the device with the step. None: of a graph, which
    finds another one on the device with each replay."""
    config: PrefillConfig
    num_tokens: int
    """Query tokens of all spans."""


@dataclasses.dataclass(slots=True)
class DecodeRows:
    """Consecutive query tokens with a row each."""

    first: int
    slots: torch.Tensor
    context_lens: torch.Tensor
    prefixes: PrefixTables | None = None
    """What the rows have in common, if that is read by a pass of its own where no window hides it."""
    plans: dict[int | None, DecodePlan] = dataclasses.field(default_factory=dict)
    """Those filled for this step, by window."""


@dataclasses.dataclass(slots=True)
class Metadata:
    """What the layers of one step share."""

    block_tables: torch.Tensor
    num_tokens: int
    """Query tokens that have an output; others get zeros."""
    decodes: list[DecodeRows]
    items: torch.Tensor | None = None
    """Of ``prefill_plan.prefill_items`` for ``prefill_config``."""
    prefill_config: PrefillConfig | None = None
    prefill_programs: int | None = None
    """As of ``paged_prefill.prefill``."""
    slot_mapping: torch.Tensor | None = None
    """[tokens] int32 or int64: where keys and values go; set by the runner."""


class TritonPagedAttention:
    """See the module. One layer's cache is [blocks, 2, kv_heads, block_size, head_dim], keys first.

    In the batch-invariant mode prefill tokens are decode rows, too, with splits at fixed places: a token's output is
    the same bits whatever else is in the step and whether it was prefilled or decoded.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, **options: Unpack[BackendOptions]) -> None:
        self.shape, self.device = shape, device
        cache_dtype, max_rows = self.cache_dtype, self.max_rows = options["cache_dtype"], options["max_rows"]
        max_context = options["max_context"]
        self.widest_dtype = max(options["dtype"], cache_dtype, key=lambda each: each.itemsize)
        self.group = shape.num_heads // shape.num_kv_heads
        self._hopper_prefill = _hopper_prefill(shape, options["dtype"], cache_dtype, device)
        self.num_sms = multiprocessors(device)
        self.decode_config = decode_config(shape.head_dim, cache_dtype)
        self.split_tiles, slots = 0, 2 * max(self.programs_of(self.decode_config), max_rows)
        if shape.batch_invariant:
            tile = self.decode_config.tile
            self.split_tiles = -(-max(SPLIT_TOKENS, -(-max_context // MAX_SPLITS)) // tile)
            slots = max_rows * -(-max_context // (self.split_tiles * tile))
        self._plans: dict[tuple[int | None, int], DecodePlan] = {}
        self.prefix_config = prefix_config(shape.head_dim, self.widest_dtype)
        self.prefix_layout = self._make_prefix_layout()
        """Of the tables of common tokens; None: there is no pass over them."""
        self._prefix_workspace: PrefixWorkspace | None = None
        if self.prefix_layout is not None:
            self._prefix_workspace = make_prefix_workspace(
                self.prefix_layout, self.prefix_config, shape.num_kv_heads, shape.head_dim, device
            )
        self._prefill_workspace = make_prefill_workspace(shape.num_kv_heads, self.num_sms, device)
        self._workspace: DecodeWorkspace = make_decode_workspace(
            slots, max_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, device
        )

    def _make_prefix_layout(self) -> PrefixLayout | None:
        config = self.prefix_config
        if self.shape.batch_invariant or self.group > config.rows:
            return None
        granule = max(config.keys, self.decode_config.tile)
        return PrefixLayout(
            self.programs_of(config), self.max_rows, config.rows // self.group, config.keys, granule
        )  # fmt: skip

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in one layer's cache."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self.cache_dtype.itemsize

    def programs_of(self, config: DecodeConfig | PrefixConfig) -> int:
        """Programs of a kernel for each KV head."""
        return max(1, self.num_sms * config.programs_per_sm // self.shape.num_kv_heads)

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache; its first dimension is the block."""
        shape = self.shape
        return (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)

    # -- once a step -------------------------------------------------------------------------------------------------

    def prepare_decode(
        self,
        slots: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        prefixes: PrefixTables | None = None,
    ) -> Metadata:
        """For a step of decode rows only, one query token each, in the order of the rows.

        Device work only, so that a CUDA graph can capture it. The tensors must keep their values until the last layer
        is done.

        Args:
            slots: [rows] int32, rows of ``block_tables``.
            context_lens: [rows] int32, tokens that a row sees, itself included; 0: a padding row, whose output is 0.
            block_tables: [slots, max_blocks] int32.
            prefixes: what the rows have in common, of ``prefix_layout``; None: nothing.
        """
        return Metadata(block_tables, len(slots), self._decodes(0, slots, context_lens, prefixes))

    def tile_cut(self, config: PrefillConfig) -> TileCut:
        """How spans are cut for a configuration of the kernel."""
        shape, programs = self.shape, config.programs_per_sm * self.num_sms
        if shape.batch_invariant:
            return TileCut(1, shape.num_kv_heads, programs, config.keys, max_pieces=0)
        tile_tokens = max(1, config.rows // self.group)
        return TileCut(tile_tokens, shape.num_kv_heads, programs, config.piece_keys, self._prefill_workspace.max_pieces)

    def prefill_config(self, longest: int, total: int) -> PrefillConfig:
        """Of the kernel, for spans of ``total`` query tokens together, the longest of so many."""
        shape, group = self.shape, self.group
        return prefill_config(
            shape.head_dim, self.widest_dtype, longest * group, total * group, shape.num_kv_heads, self.num_sms,
            self._hopper_prefill is not None,
        )  # fmt: skip

    def cut_prefill(self, spans: Int32) -> PrefillItems:
        """Cut a step's prefill spans, on the host.

        Args:
            spans: [p, 4] int32: slot, first query token in the step, query tokens, context with the last of them
                included. The context and the table of a slot hold what is written in this very step.
        """
        spans = np.asarray(spans, np.int32).reshape(-1, 4)
        num_tokens = int(spans[:, 2].sum())
        config = self.prefill_config(int(spans[:, 2].max(initial=0)), num_tokens)
        return PrefillItems(prefill_items(spans, self.tile_cut(config)), config, num_tokens)

    def prepare_mixed(
        self,
        prefill: PrefillItems,
        items: torch.Tensor,
        decode_start: int,
        slots: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        prefixes: PrefixTables | None = None,
    ) -> Metadata:
        """For a step of prefill spans and decode rows, either of which may be empty.

        Args:
            prefill: of ``cut_prefill``.
            items: its table on the device.
            decode_start: the query token of the first decode row; the others follow it.
            slots: [rows] int32, of the decode rows.
            context_lens: [rows] int32, of the decode rows.
            block_tables: [slots, max_blocks] int32.
            prefixes: what the decode rows have in common, as of ``prepare_decode``.
        """
        decodes = self._decodes(decode_start, slots, context_lens, prefixes)
        metadata = Metadata(block_tables, prefill.num_tokens + len(slots), decodes)
        if not self.shape.batch_invariant:
            metadata.items, metadata.prefill_config = items, prefill.config
            if prefill.table is None or has_pieces(prefill.table):
                metadata.prefill_programs = self.tile_cut(prefill.config).programs
        elif prefill.num_tokens:
            # An item is a token.
            assert prefill.table is not None
            by_token = items[1:][items[1:, 1].argsort()]
            for first, count in _runs(np.sort(prefill.table[1:, 1])):
                some, by_token = by_token[:count], by_token[count:]
                decodes += self._decodes(first, some[:, 0].contiguous(), some[:, 3] + 1)
        return metadata

    def _decodes(
        self, first: int, slots: torch.Tensor, context_lens: torch.Tensor, prefixes: PrefixTables | None = None
    ) -> list[DecodeRows]:
        if prefixes is not None and len(slots) <= self.max_rows:
            return [DecodeRows(first, slots, context_lens, prefixes)]
        starts = range(0, len(slots), self.max_rows)
        pieces = [(start, slice(start, start + self.max_rows)) for start in starts]
        return [DecodeRows(first + start, slots[piece], context_lens[piece]) for start, piece in pieces]

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
        """Normalise and rotate q and k, store k and v at ``metadata.slot_mapping``; see ``kernels.rope_kv``."""
        assert metadata.slot_mapping is not None
        weight, eps = (head_norm.weights, head_norm.eps) if head_norm is not None else (None, 0.0)
        return rotate_and_write(qkv, weight, eps, cos, sin, cache, metadata.slot_mapping, *scales)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
        scale: float,
        window: int | None,
        scales: KVScales,
    ) -> torch.Tensor:
        """Causal attention over each query token's context.

        Args:
            query: [tokens, num_heads, head_dim] of the model's dtype; tokens may be strided.
            cache: one layer's.
            window: positions that a token sees, itself included; None: all before it.
            scales: those that the cache was written with.

        Returns:
            [tokens, num_heads * head_dim], of query's dtype.
        """
        make = torch.zeros if len(query) > metadata.num_tokens else torch.empty
        output = make((len(query), query.shape[1] * query.shape[2]), dtype=query.dtype, device=query.device)
        tables = metadata.block_tables
        if metadata.items is not None and (config := metadata.prefill_config) is not None:
            self._prefill(query, cache, metadata, config, output, scale, window, scales)
        for index, rows in enumerate(metadata.decodes):
            plan = self._planned(rows, index, window)
            some = slice(rows.first, rows.first + len(rows.slots))
            partials = None
            if window is None and rows.prefixes is not None and self._prefix_workspace is not None:
                partials = attend_prefixes(
                    query[some], cache, tables, rows.prefixes, self._prefix_workspace, scale, self.prefix_config,
                    scales.key,
                )  # fmt: skip
            decode(
                query[some], cache, rows.slots, rows.context_lens, tables, plan, self._workspace, output[some], scale,
                self.decode_config, *scales, partials,
            )  # fmt: skip
        return output

    def _prefill(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
        config: PrefillConfig,
        output: torch.Tensor,
        scale: float,
        window: int | None,
        scales: KVScales,
    ) -> None:
        assert metadata.items is not None
        arrays = query, cache, metadata.items, metadata.block_tables, output
        programs, workspace = metadata.prefill_programs, self._prefill_workspace
        if config.is_hopper and window is None:
            assert self._hopper_prefill is not None
            self._hopper_prefill(*arrays, scale, self.num_sms, programs is not None, workspace)
        else:
            prefill(*arrays, scale, window, config, programs, workspace, *scales)

    def _planned(self, rows: DecodeRows, index: int, window: int | None) -> DecodePlan:
        """The plan of the step's ``index``-th group of rows, filled when the first layer with this window asks."""
        plan = rows.plans.get(window)
        if plan is None:
            config, key = self.decode_config, (window, index)
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = make_decode_plan(
                    self.programs_of(config), self.max_rows, config.tile, self.device,
                    programs_per_sm=config.programs_per_sm, split_tiles=self.split_tiles, window=window,
                )  # fmt: skip
            prefixes = rows.prefixes.rows if rows.prefixes is not None and window is None else None
            plan_decode(plan, rows.slots, rows.context_lens, prefixes)
            rows.plans[window] = plan
        return plan


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _hopper_prefill(
    shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> Callable[..., None] | None:
    """``kernels.hopper_prefill``, if it can compute this; only then does anything need Gluon, which is experimental."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return None
    try:
        from gpu_worker.kernels.hopper_prefill import can_run, hopper_prefill
    except (ImportError, AttributeError) as error:
        log.warning("prefill attention without the kernel for Hopper: this Triton has another Gluon", error=str(error))
        return None
    return hopper_prefill if can_run(shape.head_dim, shape.block_size, dtype, cache_dtype) else None


def _runs(tokens: Int32) -> list[tuple[int, int]]:
    """(first, count) of the runs of consecutive numbers in a sorted array."""
    ends = np.flatnonzero(np.diff(tokens) != 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(tokens, ends)]
