"""The prefill kernel against attention in plain torch, with everything unwritten NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gpu_worker.kernels import prefill_plan
from gpu_worker.kernels.paged_prefill import PrefillConfig, make_prefill_workspace, prefill, prefill_config
from gpu_worker.kernels.prefill_plan import COLUMNS, TileCut, has_pieces, max_items, prefill_items
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
    programs: int = 5,
    padding: int = 0,
) -> int:
    """Attend over spans that lie in the step with a gap before each, and compare with the reference: in turns, twice,
    and if no context is cut with a program for each item.

    Returns:
        The pieces of contexts that were cut.
    """
    paged = make_paged([context for _, context in spans], kv_heads, head_dim, block_size, dtype, device)
    counts = [count for count, _ in spans]
    starts = np.cumsum([0, *counts[:-1]]) + np.arange(len(spans)) + 1
    total = int(starts[-1]) + counts[-1]
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(total, heads, head_dim, generator=generator).to(dtype).to(device)
    table = np.array([(slot, starts[slot], *spans[slot]) for slot in range(len(spans))], np.int32)
    workspace = make_prefill_workspace(kv_heads, 8, device)
    cut = TileCut(config.rows // (heads // kv_heads), kv_heads, programs, config.keys, workspace.max_pieces)
    items = prefill_items(table, cut)
    padded = np.concatenate([items, np.zeros((padding, COLUMNS), np.int32)])
    scale = head_dim**-0.5
    workspace.values.fill_(torch.nan)
    outputs = []
    for table, at_a_time in ((padded, programs), (padded, programs), (items, None)):
        if at_a_time is not None or not has_pieces(items):
            outputs.append(torch.full_like(query, 7.0))
            there = torch.from_numpy(table).to(device)
            prefill(
                query, paged.cache, there, paged.block_tables, outputs[-1], scale, window, config, at_a_time, workspace
            )  # fmt: skip
            torch.testing.assert_close(outputs[-1], outputs[0], rtol=0, atol=0)
    output = outputs[0]
    assert not workspace.arrivals.any()
    untouched = torch.ones(total, dtype=torch.bool)
    for slot, (count, context) in enumerate(spans):
        some = slice(int(starts[slot]), int(starts[slot]) + count)
        untouched[some] = False
        expected = attend(query[some], *paged.context(slot, context), scale, window)
        torch.testing.assert_close(output[some].float(), expected, **tolerance(dtype))
    assert (output[untouched.to(device)] == 7.0).all()
    return int((items[1:, 6] > 1).sum())


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


@pytest.mark.parametrize(
    ("head_dim", "group", "kv_heads", "keys", "spans"),
    [
        (64, 4, 1, 16, [(8, 200)]),
        (64, 2, 2, 16, [(9, 130), (30, 30)]),
        (128, 1, 1, 32, [(16, 129), (3, 300)]),
        (80, 3, 2, 16, [(5, 96), (4, 200)]),
    ],
)
@pytest.mark.parametrize("window", [None, 40])
def test_contexts_in_pieces(
    head_dim: int,
    group: int,
    kv_heads: int,
    keys: int,
    spans: list[tuple[int, int]],
    window: int | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More programs than tiles; a window hides whole pieces."""
    monkeypatch.setattr(prefill_plan, "LEAST_PIECE", 32)
    monkeypatch.setattr(prefill_plan, "PIECE_COST", 1)
    config = PrefillConfig(16, keys, num_warps=4, num_stages=2)
    heads = group * kv_heads
    pieces = run(spans, heads, kv_heads, head_dim, 16, config, HALF, device, window, programs=12, padding=3)
    assert pieces > 1


def items_of(spans: list[tuple[int, int]], cut: TileCut) -> np.ndarray:
    """The items of spans (query tokens, context) that follow one another, checked: each tile has all of its keys once,
    in pieces that are numbered and have places of their own."""
    starts = np.cumsum([0, *(count for count, _ in spans)])
    table = prefill_items(np.array([(9 + i, starts[i], *span) for i, span in enumerate(spans)], np.int32), cut)
    items = table[1:]
    assert table.shape[1] == COLUMNS
    assert table[0, 0] == len(items)
    assert len(items) <= max_items(int(starts[-1]), len(spans), cut)
    lengths = items[:, 5] - items[:, 4]
    assert list(lengths) == sorted(lengths, reverse=True)
    places = set()
    tiles: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for *tile, begin, end, pieces, index, first in items.tolist():
        tiles.setdefault(tuple(tile), []).append((index, begin, end, pieces))
        if pieces > 1:
            assert first + index < cut.max_pieces
            assert (first + index) not in places
            places.add(first + index)
    tokens = []
    for (slot, first, count, position), pieces_of_tile in tiles.items():
        tokens += range(first, first + count)
        number = slot - 9
        assert position == spans[number][1] - spans[number][0] + first - starts[number]
        ordered = sorted(pieces_of_tile)
        assert [piece[0] for piece in ordered] == list(range(ordered[0][3]))
        assert [piece[1] for piece in ordered] == [0, *(piece[2] for piece in ordered[:-1])]
        assert ordered[-1][2] == position + count
        assert all(piece[1] % cut.keys == 0 < piece[2] - piece[1] for piece in ordered)
    assert sorted(tokens) == list(range(starts[-1]))
    return items


def test_items_cover_each_query_token_once() -> None:
    cut = TileCut(4, 2, 8, 16, 16)
    items = items_of([(7, 20), (1, 1), (8, 8)], cut)
    assert {tuple(item) for item in items[:, :4].tolist()} == {
        (9, 0, 4, 13), (9, 4, 3, 17), (10, 7, 1, 0), (11, 8, 4, 0), (11, 12, 4, 4)
    }  # fmt: skip
    assert prefill_items(np.empty((0, 4), np.int32), cut).tolist() == [[0] * COLUMNS]


def busiest(items: np.ndarray, cut: TileCut) -> float:
    """Keys of the busiest program over the average."""
    taken = [0.0] * cut.programs
    lengths = np.repeat(items[:, 5] - items[:, 4], cut.kv_heads)
    for unit, length in enumerate(lengths.tolist()):
        turn, place = divmod(unit, cut.programs)
        taken[place if turn % 2 == 0 else cut.programs - 1 - place] += length
    return max(taken) / (sum(taken) / cut.programs)


H200 = TileCut(32, 8, 132, 64, 33)
"""Llama-3.1-8B there."""


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([(1248, 4096)], 1.2),
        ([(992, 4096)], 1.1),
        ([(1120, 5000)], 1.1),
        ([(256, 8192)], 1.1),
        ([(64, 100_000)], 1.1),
        ([(33, 60_000), (500, 500)], 1.2),
        ([(8192, 8192)], 1.05),
        ([(1024, 1024)] * 8, 1.05),
    ],
)
def test_programs_have_about_the_same_work(spans: list[tuple[int, int]], most: float) -> None:
    assert busiest(items_of(spans, H200), H200) < most


def test_what_gains_nothing_is_not_cut() -> None:
    for spans in ([(512, 512)], [(8192, 8192)], [(100, 900), (30, 30)]):
        assert (items_of(spans, H200)[:, 6] == 1).all()
    assert (items_of([(64, 100_000)], H200._replace(max_pieces=0))[:, 6] == 1).all()


def test_random_spans_are_cut_right() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        counts = draw.integers(1, 400, draw.integers(1, 8)).tolist()
        spans = [(count, count + int(draw.choice([0, 5, 1000, 9000]))) for count in counts]
        cut = TileCut(int(draw.choice([1, 8, 32])), int(draw.choice([1, 2, 8])), int(draw.choice([4, 132])), 64, 33)
        items_of(spans, cut)
