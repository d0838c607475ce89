"""The pass over common tokens with the decode kernel behind it, against attention in plain torch."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from gpu_worker.attention.base import UNSCALED, AttentionShape
from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.kernels.attention_plan import make_decode_plan, plan_decode
from gpu_worker.kernels.paged_decode import decode, decode_config, make_decode_workspace
from gpu_worker.kernels.prefix_pass import PrefixConfig, attend_prefixes, make_prefix_workspace, prefix_config, unpack
from gpu_worker.shared_prefix import PrefixLayout, SharedPrefixes, SharingLimits, find_groups, pack
from tests.kernels.attention_reference import HALF, Rows, make_paged, tolerance

LIMITS = SharingLimits(members=2, tokens=16, saved=1)
MAX_ROWS = 40


def make_rows(
    families: list[tuple[int, list[int]]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Rows:
    """Rows of several families, in an order that mixes them.

    Args:
        families: (common tokens, contexts of the rows).
    """
    contexts = [context for _, members in families for context in members]
    paged = make_paged(contexts, kv_heads, head_dim, block_size, dtype, device)
    first = 0
    for common, members in families:
        paged.block_tables[first : first + len(members), : common // block_size] = paged.block_tables[
            first, : common // block_size
        ]
        first += len(members)
    order = torch.randperm(len(contexts), generator=torch.Generator().manual_seed(2))
    lengths = [contexts[slot] for slot in order.tolist()]
    query = torch.randn(len(lengths), heads, head_dim, generator=torch.Generator().manual_seed(1))
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Rows(paged, lengths, query.to(dtype).to(device), order.to(device, torch.int32), context_lens)


class Kernels:
    """Both passes, as a backend holds them."""

    def __init__(self, rows: Rows, tile: int, config: PrefixConfig, programs: int) -> None:
        device, (_, heads, head_dim) = rows.query.device, rows.query.shape
        cache = rows.paged.cache
        kv_heads, self.block_size = cache.shape[2], cache.shape[3]
        tile_rows = config.rows * kv_heads // heads
        self.layout = PrefixLayout(programs, MAX_ROWS, tile_rows, config.keys, max(tile, config.keys))
        self.packed = torch.zeros(sum(self.layout.sizes), dtype=torch.int32, device=device)
        self.tables = unpack(self.layout, self.packed)
        self.prefix_config = config
        self.prefix_workspace = make_prefix_workspace(self.layout, config, kv_heads, head_dim, device)
        for tensor in self.prefix_workspace:
            tensor.fill_(float("nan"))
        self.config = dataclasses.replace(decode_config(head_dim, cache.dtype), tile=tile)
        self.plan = make_decode_plan(5, MAX_ROWS, tile, device)
        self.workspace = make_decode_workspace(2 * MAX_ROWS, MAX_ROWS, heads, kv_heads, head_dim, device)

    def group(self, rows: Rows) -> list[tuple[int, int]]:
        """Find the groups, and bring them to the device: (members, tokens) of each."""
        slots = rows.slots.cpu().numpy()
        tables, lengths = rows.paged.block_tables.cpu().numpy(), np.array(rows.lengths, np.int64) - 1
        groups = find_groups(tables, slots, lengths, self.block_size, self.layout.granule, LIMITS)
        self.packed.copy_(torch.from_numpy(pack(groups, slots, self.layout)))
        return [(len(group.rows), group.tokens) for group in groups]

    def __call__(self, rows: Rows, scale: float, k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
        output = torch.full_like(rows.query, float("nan"))
        cache, block_tables = rows.paged.cache, rows.paged.block_tables
        plan_decode(self.plan, rows.slots, rows.context_lens, self.tables.rows)
        partials = attend_prefixes(
            rows.query, cache, block_tables, self.tables, self.prefix_workspace, scale, self.prefix_config, k_scale
        )
        decode(
            rows.query, cache, rows.slots, rows.context_lens, block_tables, self.plan, self.workspace, output, scale,
            self.config, k_scale, v_scale, partials,
        )  # fmt: skip
        assert not self.workspace.arrivals.any()
        return output


def config_of(rows: int, keys: int, dtype: torch.dtype = HALF) -> PrefixConfig:
    return dataclasses.replace(prefix_config(64, dtype), rows=rows, keys=keys)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "kv_heads", "tile", "tile_rows", "keys", "programs"),
    [
        (64, 16, 1, 2, 16, 16, 32, 5),
        (64, 32, 4, 1, 32, 16, 16, 3),
        (80, 16, 2, 1, 32, 16, 32, 4),
        (128, 16, 2, 2, 32, 32, 16, 1),
        (128, 64, 8, 1, 64, 32, 64, 2),
        (128, 32, 7, 1, 16, 32, 32, 16),
        (256, 16, 16, 1, 16, 64, 16, 6),
        (64, 16, 3, 1, 16, 16, 16, 40),
    ],
)
def test_rows_equal_the_reference(
    head_dim: int,
    block_size: int,
    group: int,
    kv_heads: int,
    tile: int,
    tile_rows: int,
    keys: int,
    programs: int,
    device: torch.device,
) -> None:
    # More rows than a tile has, rows with one token beyond the prefix, another prefix, rows without a group, padding.
    families = [(64, [65, 200, 90, 64 + tile, 65 + tile, 130]), (128, [129, 150, 300]), (0, [1, 0, 70, 0, 33])]
    rows = make_rows(families, group * kv_heads, kv_heads, head_dim, block_size, HALF, device)
    kernels = Kernels(rows, tile, config_of(tile_rows, keys), programs)
    assert sorted(kernels.group(rows)) == [(3, 128), (6, 64)]
    scale = head_dim**-0.5
    torch.testing.assert_close(kernels(rows, scale).float(), rows.expected(scale), **tolerance(HALF))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "tile_rows", "keys"),
    list(itertools.product((64, 80, 128, 256), (16, 32, 64), (1, 2, 5, 16), (16, 64), (16, 64))),
)
def test_rows_of_every_shape_equal_the_reference(
    head_dim: int,
    block_size: int,
    group: int,
    tile_rows: int,
    keys: int,
    device: torch.device,
) -> None:
    tile, programs = (16, 9) if keys == 64 else (64, 2)
    test_rows_equal_the_reference(head_dim, block_size, group, 2, tile, tile_rows, keys, programs, device)


@pytest.mark.parametrize(("members", "programs"), [(2, 2), (7, 50), (8, 2), (9, 50), (16, 3), (17, 50)])
def test_groups_around_the_rows_of_a_tile(members: int, programs: int, device: torch.device) -> None:
    rows = make_rows([(96, [97 + 3 * index for index in range(members)])], 2, 1, 64, 16, HALF, device)
    kernels = Kernels(rows, 16, config_of(16, 32), programs)
    assert kernels.group(rows) == [(members, 96)]
    torch.testing.assert_close(kernels(rows, 0.125).float(), rows.expected(0.125), **tolerance(HALF))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows([(64, [65, 70, 100]), (0, [40])], 4, 2, 64, 16, dtype, device)
    kernels = Kernels(rows, 16, config_of(16, 16, dtype), 4)
    assert kernels.group(rows) == [(3, 64)]
    torch.testing.assert_close(kernels(rows, 0.125).float(), rows.expected(0.125), **tolerance(dtype))


def test_float8_cache_with_scales(device: torch.device) -> None:
    families = [(64, [65, 70, 100]), (0, [40])]
    exact = make_rows(families, 4, 2, 64, 16, torch.float32, device)
    stored = exact.paged.cache / 0.5
    stored[:, 1] = exact.paged.cache[:, 1] / 0.25
    stored = stored.to(torch.float8_e4m3fn)
    rows = make_rows(families, 4, 2, 64, 16, HALF, device)
    rows.paged.cache = stored
    kernels = Kernels(rows, 16, config_of(16, 16), 3)
    assert kernels.group(rows) == [(3, 64)]
    result = kernels(rows, 0.125, k_scale=0.5, v_scale=0.25)
    read = stored.float() * 0.5
    read[:, 1] = stored[:, 1].float() * 0.25
    rows.paged.cache = read
    torch.testing.assert_close(result.float(), rows.expected(0.125), **tolerance(HALF))


def test_tables_serve_rows_that_grow_and_other_groups_replace_them(device: torch.device) -> None:
    families = [(64, [200, 210, 220, 230]), (48, [100, 110, 120])]
    rows = make_rows(families, 4, 2, 64, 16, HALF, device)
    kernels = Kernels(rows, 16, config_of(16, 16), 3)
    lengths = rows.lengths
    rows.lengths = [length - 40 for length in lengths]
    assert len(kernels.group(rows)) == 2
    for shorter in (40, 39, 0):
        rows.lengths = [length - shorter for length in lengths]
        rows.context_lens = torch.tensor(rows.lengths, dtype=torch.int32, device=device)
        torch.testing.assert_close(kernels(rows, 0.125).float(), rows.expected(0.125), **tolerance(HALF))
    fewer = dataclasses.replace(
        rows, lengths=rows.lengths[:5], query=rows.query[:5], slots=rows.slots[:5], context_lens=rows.context_lens[:5]
    )
    kernels.group(fewer)
    torch.testing.assert_close(kernels(fewer, 0.125).float(), fewer.expected(0.125), **tolerance(HALF))


def test_padding_where_the_tables_name_a_row(device: torch.device) -> None:
    """The first run of a graph's kernels is of padding rows only, with tables that are already there."""
    rows = make_rows([(64, [80, 90, 100])], 4, 2, 64, 16, HALF, device)
    kernels = Kernels(rows, 16, config_of(16, 16), 3)
    kernels.group(rows)
    rows.context_lens.zero_()
    assert not kernels(rows, 0.125).any()


@pytest.mark.parametrize("window", [None, 40])
def test_the_backend_uses_the_pass_where_no_window_hides_tokens(window: int | None, device: torch.device) -> None:
    rows = make_rows([(128, [129, 150, 170]), (0, [20])], 4, 2, 64, 16, HALF, device)
    shape = AttentionShape(4, 2, 64, 16)
    backend = TritonPagedAttention(shape, device, dtype=HALF, cache_dtype=HALF, max_rows=8, max_context=256)
    assert backend.prefix_layout is not None
    slots, lengths = rows.slots.cpu().numpy(), np.array(rows.lengths, np.int64)
    shared = SharedPrefixes(backend.prefix_layout, 16, LIMITS)
    packed = shared.update(
        slots, np.zeros(4, np.int64), lengths[slots.argsort()], rows.paged.block_tables.cpu().numpy()
    )
    assert [group.tokens for group in shared.groups] == [128]
    prefixes = unpack(backend.prefix_layout, torch.from_numpy(packed).to(device))
    arguments = rows.slots, rows.context_lens, rows.paged.block_tables
    with_pass, without = backend.prepare_decode(*arguments, prefixes), backend.prepare_decode(*arguments)
    results = [
        backend.attend(rows.query, rows.paged.cache, metadata, 0.125, window, UNSCALED).view(4, 4, 64)
        for metadata in (with_pass, without)
    ]
    torch.testing.assert_close(results[0].float(), rows.expected(0.125, window), **tolerance(HALF))
    assert torch.equal(*results) == (window is not None)


def test_batch_invariant_attention_has_no_pass(device: torch.device) -> None:
    shape = AttentionShape(4, 2, 64, 16, batch_invariant=True)
    backend = TritonPagedAttention(shape, device, dtype=HALF, cache_dtype=HALF, max_rows=8, max_context=256)
    assert backend.prefix_layout is None
