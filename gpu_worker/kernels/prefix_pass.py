"""The pass over what many decode rows have in common: its keys and values are read once for all of them.

The rows of a group and the heads that share a KV head are the rows of one product, as query tokens are in
``paged_prefill``: row r of a tile is row ``r // group`` of a task and head ``r % group``. All of them see all common
tokens. What this leaves of a row (maximum, sum and values, as the decode kernel leaves them) is joined by whoever
finishes the row in ``paged_decode``, which walks the rest of its context.

How the work is divided, and the tables that say so: ``gpu_worker.shared_prefix``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.paged_prefill import LOG2_E, attend_keys
from gpu_worker.shared_prefix import PrefixLayout


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixConfig:
    """How the kernel is compiled and launched."""

    rows: int
    """Of a tile: rows of the step * heads of a group."""
    keys: int
    """Tokens in one iteration."""
    num_warps: int
    num_stages: int
    programs_per_sm: int


def prefix_config(head_dim: int, dtype: torch.dtype) -> PrefixConfig:
    """The configuration for a shape.

    Args:
        dtype: of the products.
    """
    is_wide = triton.next_power_of_2(head_dim) > 128
    if dtype.itemsize > 2:
        return PrefixConfig(rows=32, keys=16 if is_wide else 32, num_warps=8, num_stages=2, programs_per_sm=1)
    if is_wide:
        return PrefixConfig(rows=64, keys=32, num_warps=4, num_stages=2, programs_per_sm=1)
    return PrefixConfig(rows=64, keys=64, num_warps=4, num_stages=3, programs_per_sm=1)


class PrefixTables(NamedTuple):
    """The parts of ``shared_prefix.pack`` on the device, int32."""

    programs: torch.Tensor
    """[programs, 4]."""
    rows: torch.Tensor
    """[rows, 4]."""
    tasks: torch.Tensor
    """[tasks, 2 + rows of a task]."""


def unpack(layout: PrefixLayout, packed: torch.Tensor) -> PrefixTables:
    """Views of ``packed`` [sum(layout.sizes)]."""
    programs, rows, tasks = torch.split(packed, list(layout.sizes))
    return PrefixTables(programs.view(-1, 4), rows.view(-1, 4), tasks.view(-1, 2 + layout.tile_rows))


class PrefixPartials(NamedTuple):
    """What the pass leaves, and where each row finds its own."""

    rows: torch.Tensor
    """[rows, 4] int32, of ``PrefixTables``."""
    values: torch.Tensor
    statistics: torch.Tensor
    """Both of ``PrefixWorkspace``."""


class PrefixWorkspace(NamedTuple):
    """Memory for what the pass leaves; allocated once, used by all layers."""

    values: torch.Tensor
    """[partials, kv_heads, config.rows, head_dim] float32: sums of exp2(score - maximum) * value."""
    statistics: torch.Tensor
    """[partials, kv_heads, config.rows, 2] float32: maximum of the scores (to base 2), sum of exp2(score - maximum)."""


def make_prefix_workspace(
    layout: PrefixLayout, config: PrefixConfig, kv_heads: int, head_dim: int, device: torch.device
) -> PrefixWorkspace:
    """Allocate a workspace."""
    shape = (layout.num_partials, kv_heads, config.rows)
    values, statistics = (torch.empty((*shape, size), dtype=torch.float32, device=device) for size in (head_dim, 2))
    return PrefixWorkspace(values, statistics)


def attend_prefixes(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    tables: PrefixTables,
    workspace: PrefixWorkspace,
    scale: float,
    config: PrefixConfig,
    k_scale: float = 1.0,
) -> PrefixPartials:
    """Attention of each group's rows over their common tokens, in float32, for ``paged_decode.decode`` to go on with.

    Args:
        query: [rows, heads, head_dim] of the model's dtype; a row's heads are contiguous.
        cache: [blocks, 2, kv_heads, block_size, head_dim], keys first, contiguous; of query's dtype or float8_e4m3fn.
        block_tables: [slots, max_blocks] int32, rows contiguous.
        tables: the groups, for ``config.keys`` tokens of a tile.
        k_scale: what the cache's keys must be multiplied by.
    """
    _, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = cache.shape
    task_rows = tables.tasks.shape[1] - 2
    assert cache.is_contiguous()
    assert query.stride()[1:] == (head_dim, 1)
    assert task_rows * (heads // kv_heads) <= config.rows == workspace.values.shape[2]
    _prefix_kernel[(len(tables.programs) * kv_heads,)](
        query,
        cache,
        block_tables,
        tables.programs,
        tables.tasks,
        *workspace,
        scale * k_scale * LOG2_E,
        query.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TASK_ROWS=task_rows,
        ROWS=config.rows,
        KEYS=config.keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return PrefixPartials(tables.rows, *workspace)


@triton.jit(do_not_specialize_on_alignment=["table_stride"])
def _prefix_kernel(
    query_ptr,
    cache_ptr,
    block_tables_ptr,
    programs_ptr,
    tasks_ptr,
    values_ptr,
    statistics_ptr,
    scale,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TASK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Heads vary fastest: programs that run side by side read the same blocks.
    program, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    first_task = tl.load(programs_ptr + 4 * program)
    first_tile = tl.load(programs_ptr + 4 * program + 1)
    last_tile = tl.load(programs_ptr + 4 * program + 2)
    visits = tl.load(programs_ptr + 4 * program + 3)
    packed_row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_TILE)
    member = packed_row // GROUP
    place = (head * GROUP + packed_row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    head_ptr = cache_ptr + head * (BLOCK_SIZE * HEAD_DIM)
    for visit in range(visits):
        task = first_task + visit
        task_ptr = tasks_ptr + task * (2 + TASK_ROWS)
        slot, task_tiles = tl.load(task_ptr), tl.load(task_ptr + 1)
        row = tl.load(task_ptr + 2 + member, member < TASK_ROWS, other=-1)
        is_element = (row >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
        query = tl.load(query_ptr + row.to(tl.int64)[:, None] * query_stride + place, is_element, other=0.0)
        table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
        # Nothing is carried from one task to the next: Triton 3.6 and 3.7 lose a number that is (layout conversions).
        begin = tl.where(visit == 0, first_tile, 0)
        end = tl.where(visit == visits - 1, last_tile, task_tiles)
        maximum, total, values = attend_keys(
            tl.full((ROWS,), float("-inf"), tl.float32),
            tl.zeros((ROWS,), tl.float32),
            tl.zeros((ROWS, DIM_TILE), tl.float32),
            query, head_ptr, table_ptr, begin * KEYS, end * KEYS, None, task_tiles * KEYS, 0, scale,
            KV_HEADS, HEAD_DIM, DIM_TILE, BLOCK_SIZE, KEYS, False, False,
        )  # fmt: skip
        part = ((program + task).to(tl.int64) * KV_HEADS + head) * ROWS + packed_row
        tl.store(values_ptr + part[:, None] * HEAD_DIM + dim[None, :], values, is_element)
        tl.store(statistics_ptr + 2 * part, maximum, row >= 0)
        tl.store(statistics_ptr + 2 * part + 1, total, row >= 0)
