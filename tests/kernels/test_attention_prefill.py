"""The prefill kernel against attention in plain torch, with everything unwritten NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gpu_worker.kernels.attention_plan import prefill_tiles
from gpu_worker.kernels.paged_prefill import PrefillConfig, prefill, prefill_config
from tests.kernels.attention_reference import HALF, attend, make_paged, tolerance

EDGES = [(1, 1), (16, 16), (17, 33), (5, 64), (31, 31), (1, 40)]
"""(query tokens, context) of spans."""


def run(
    spans: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    config: PrefillConfig,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> None:
    """Attend over spans that lie in the step with a gap before each, and compare with the reference."""
    paged = make_paged([context for _, context in spans], kv_heads, head_dim, block_size, dtype, device)
    counts = [count for count, _ in spans]
    starts = np.cumsum([0, *counts[:-1]]) + np.arange(len(spans)) + 1
    total = int(starts[-1]) + counts[-1]
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(total, heads, head_dim, generator=generator).to(dtype).to(device)
    table = np.array([(slot, starts[slot], *spans[slot]) for slot in range(len(spans))], np.int32)
    tiles = torch.from_numpy(prefill_tiles(table, config.rows // (heads // kv_heads))).to(device)
    output = torch.full_like(query, 7.0)
    scale = head_dim**-0.5
    prefill(query, paged.cache, tiles, paged.block_tables, output, scale, window, config)
    untouched = torch.ones(total, dtype=torch.bool)
    for slot, (count, context) in enumerate(spans):
        some = slice(int(starts[slot]), int(starts[slot]) + count)
        untouched[some] = False
        expected = attend(query[some], *paged.context(slot, context), scale, window)
        torch.testing.assert_close(output[some].float(), expected, **tolerance(dtype))
    assert (output[untouched.to(device)] == 7.0).all()


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "kv_heads", "rows", "keys"),
    [
        (64, 16, 1, 2, 16, 16),
        (64, 32, 4, 1, 32, 32),
        (80, 16, 2, 1, 16, 32),
        (96, 64, 3, 2, 32, 16),
        (128, 16, 2, 2, 64, 64),
        (128, 64, 8, 1, 64, 32),
        (128, 32, 7, 1, 32, 64),
        (256, 16, 16, 1, 32, 16),
    ],
)
def test_spans_equal_the_reference(
    head_dim: int, block_size: int, group: int, kv_heads: int, rows: int, keys: int, device: torch.device
) -> None:
    config = PrefillConfig(rows, keys, num_warps=4, num_stages=2)
    run(EDGES, group * kv_heads, kv_heads, head_dim, block_size, config, HALF, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "rows", "keys"),
    list(itertools.product((64, 80, 96, 128, 256), (16, 32, 64), (1, 2, 5, 8, 16), (16, 64), (16, 64))),
)
def test_spans_of_every_shape_equal_the_reference(
    head_dim: int, block_size: int, group: int, rows: int, keys: int, device: torch.device
) -> None:
    test_spans_equal_the_reference(head_dim, block_size, group, 2, rows, keys, device)


@pytest.mark.parametrize("window", [1, 15, 16, 20, 1000])
def test_a_window_hides_what_is_before_it(window: int, device: torch.device) -> None:
    config = PrefillConfig(16, 16, num_warps=4, num_stages=2)
    run([(20, 70), (40, 40), (3, 3)], 2, 1, 64, 16, config, torch.float32, device, window)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (128, HALF), (256, HALF), (256, torch.float32)])
@pytest.mark.parametrize("longest", [8, 40, 200])
def test_the_configurations_of_a_gpu(head_dim: int, dtype: torch.dtype, longest: int, device: torch.device) -> None:
    config = prefill_config(head_dim, dtype, longest, longest, 1, 1)
    run([(longest // 2, longest + 30), (1, 1)], 2, 1, head_dim, 16, config, dtype, device)


def test_tiles_cover_each_query_token_once() -> None:
    spans = np.array([(3, 10, 7, 20), (1, 0, 1, 1), (2, 17, 8, 8)], np.int32)
    tiles = prefill_tiles(spans, 4)
    tokens = sorted(int(t) for _, first, count, _ in tiles for t in range(first, first + count))
    assert tokens == [0, *range(10, 25)]
    assert {tuple(tile) for tile in tiles.tolist()} == {
        (3, 10, 4, 13), (3, 14, 3, 17), (1, 0, 1, 0), (2, 17, 4, 0), (2, 21, 4, 4)
    }  # fmt: skip
    assert list(tiles[:, 3]) == sorted(tiles[:, 3], reverse=True)
    assert prefill_tiles(np.empty((0, 4), np.int32), 4).shape == (0, 4)
