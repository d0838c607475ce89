"""The decode kernel and its plan against attention in plain torch, with everything unwritten NaN."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gpu_worker.kernels.attention_plan import DecodePlan, make_decode_plan, plan_decode
from gpu_worker.kernels.paged_decode import DecodeConfig, DecodeWorkspace, decode, decode_config, make_decode_workspace
from tests.kernels.attention_reference import HALF, Rows, make_paged, tolerance


def make_rows(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Rows:
    paged = make_paged(lengths[::-1], kv_heads, head_dim, block_size, dtype, device)
    query = torch.randn(len(lengths), heads, head_dim, generator=torch.Generator().manual_seed(1))
    slots = torch.arange(len(lengths)).flip(0).to(device, torch.int32)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Rows(paged, lengths, query.to(dtype).to(device), slots, context_lens)


@dataclasses.dataclass
class Kernel:
    """The kernel with its plan and workspace, as a backend holds them."""

    plan: DecodePlan
    workspace: DecodeWorkspace
    config: DecodeConfig

    def __call__(self, rows: Rows, scale: float, k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
        output = torch.full_like(rows.query, float("nan"))
        plan_decode(self.plan, rows.slots, rows.context_lens)
        decode(
            rows.query, rows.paged.cache, rows.slots, rows.context_lens, rows.paged.block_tables, self.plan,
            self.workspace, output, scale, self.config, k_scale, v_scale,
        )  # fmt: skip
        assert not self.workspace.arrivals.any()
        return output


def make_kernel(
    rows: Rows, num_programs: int, tile: int, *, split_tiles: int = 0, window: int | None = None, max_rows: int = 64
) -> Kernel:
    device, (_, heads, head_dim) = rows.query.device, rows.query.shape
    config = dataclasses.replace(decode_config(head_dim, rows.paged.cache.dtype), tile=tile)
    plan = make_decode_plan(num_programs, max_rows, tile, device, split_tiles=split_tiles, window=window)
    slots = 2 * num_programs if not split_tiles else 64 * max_rows
    kv_heads = rows.paged.cache.shape[2]
    return Kernel(plan, make_decode_workspace(slots, max_rows, heads, kv_heads, head_dim, device), config)


# -- the plan --------------------------------------------------------------------------------------------------------


def fill(plan: DecodePlan, lengths: list[int]) -> None:
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=plan.programs.device)
    plan_decode(plan, torch.arange(len(lengths), dtype=torch.int32, device=plan.programs.device), context_lens)


def owners(plan: DecodePlan, tiles: list[int]) -> dict[tuple[int, int], int]:
    """Which program has which (row, unit), walked as the kernel walks; every slot of a partial as well."""
    owner: dict[tuple[int, int], int] = {}
    for program, (row, unit, units, touched) in enumerate(plan.programs[:, :4].tolist()):
        visited = 0
        while units:
            taken = min(units, tiles[row] - unit)
            for index in range(unit, unit + taken):
                assert (row, index) not in owner
                owner[row, index] = program
            visited, units = visited + 1, units - taken
            row, unit = (row + 1, 0) if unit + taken == tiles[row] else (row, unit + taken)
        assert visited == touched
    return owner


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [16],
        [17, 1],
        [0, 0, 0],
        [5, 0, 0, 40, 0],
        [0, 300, 0, 1, 1, 1, 1, 1, 2000],
        [33] * 40,
        [1000, 1, 1000, 1, 16, 15, 17],
    ],
    ids=str,
)
@pytest.mark.parametrize("num_programs", [1, 3, 16])
def test_plan_gives_each_unit_to_one_program(lengths: list[int], num_programs: int, device: torch.device) -> None:
    plan = make_decode_plan(num_programs, 64, 16, device)
    fill(plan, lengths)
    tiles = [-(-length // 16) for length in lengths]
    owner = owners(plan, tiles)
    assert set(owner) == {(row, unit) for row, count in enumerate(tiles) for unit in range(count)}
    for row, count in enumerate(tiles):
        if not count:
            continue
        programs = sorted({owner[row, unit] for unit in range(count)})
        first_slot, parts = plan.row_parts[row].tolist()
        assert programs == list(range(programs[0], programs[0] + parts))
        is_first = int(plan.programs[programs[0], 0]) == row
        assert first_slot == 2 * programs[0] + (not is_first)


def shares(plan: DecodePlan, lengths: list[int]) -> list[int]:
    """Units of each program that has any."""
    fill(plan, lengths)
    return [units for units in plan.programs[: plan.num_programs(len(lengths)), 2].tolist() if units]


@pytest.mark.parametrize("num_programs", [3, 16])
@pytest.mark.parametrize("lengths", [[300, 1, 1, 1, 1, 1, 2000], [1] * 30 + [1000]], ids=str)
def test_very_different_rows_are_divided_evenly(lengths: list[int], num_programs: int, device: torch.device) -> None:
    found = shares(make_decode_plan(num_programs, 64, 16, device), lengths)
    assert len(found) == num_programs
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([64] * 12, [4] * 12),
        ([64] * 20, [4] * 20),
        ([160] * 8, [5] * 16),
        ([128], [1] * 8),
        ([1024], [4] * 16),
        ([40, 0, 60], [1, 1, 1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_like_rows_are_cut_in_like_parts(lengths: list[int], expected: list[int], device: torch.device) -> None:
    assert shares(make_decode_plan(16, 64, 16, device), lengths) == expected


def test_plan_of_a_window_counts_visible_tiles(device: torch.device) -> None:
    plan = make_decode_plan(4, 8, 16, device, window=20)
    fill(plan, [100, 5, 36, 21])
    assert int(plan.programs[:, 2].sum()) == 2 + 1 + 2 + 2


# -- the kernel ------------------------------------------------------------------------------------------------------

EDGES = [1, 0, 15, 16, 17, 33, 100]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "kv_heads", "tile", "programs"),
    [
        (64, 16, 1, 2, 16, 5),
        (64, 32, 4, 1, 32, 3),
        (80, 16, 2, 1, 32, 4),
        (96, 64, 3, 1, 16, 7),
        (128, 16, 2, 2, 32, 1),
        (128, 64, 8, 1, 64, 2),
        (128, 32, 7, 1, 16, 16),
        (256, 16, 16, 1, 16, 6),
        (64, 16, 20, 1, 16, 3),
    ],
)
def test_rows_equal_the_reference(
    head_dim: int, block_size: int, group: int, kv_heads: int, tile: int, programs: int, device: torch.device
) -> None:
    rows = make_rows(EDGES, group * kv_heads, kv_heads, head_dim, block_size, HALF, device)
    scale = head_dim**-0.5
    result = make_kernel(rows, programs, tile)(rows, scale)
    torch.testing.assert_close(result.float(), rows.expected(scale), **tolerance(HALF))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "tile", "programs"),
    list(itertools.product((64, 80, 96, 128, 256), (16, 32, 64), (1, 2, 5, 8, 16), (16, 64), (2, 9))),
)
def test_rows_of_every_shape_equal_the_reference(
    head_dim: int, block_size: int, group: int, tile: int, programs: int, device: torch.device
) -> None:
    test_rows_equal_the_reference(head_dim, block_size, group, 2, tile, programs, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows([70, 3], 4, 2, 64, 16, dtype, device)
    result = make_kernel(rows, 4, 16)(rows, 0.125)
    torch.testing.assert_close(result.float(), rows.expected(0.125), **tolerance(dtype))


@pytest.mark.parametrize("window", [1, 16, 20, 1000])
@pytest.mark.parametrize("split_tiles", [0, 2])
def test_a_window_hides_what_is_before_it(window: int, split_tiles: int, device: torch.device) -> None:
    rows = make_rows([90, 1, 16, 37], 2, 1, 64, 16, torch.float32, device)
    result = make_kernel(rows, 3, 16, window=window, split_tiles=split_tiles)(rows, 0.125)
    torch.testing.assert_close(result, rows.expected(0.125, window), **tolerance(torch.float32))


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 20, 0, 0], [20, 0, 0, 0, 33, 0, 0, 0, 0]], ids=str)
def test_rows_without_context_are_zero(lengths: list[int], device: torch.device) -> None:
    rows = make_rows(lengths, 2, 1, 64, 16, HALF, device)
    result = make_kernel(rows, 2, 16)(rows, 0.125)
    assert torch.isfinite(result).all()
    assert not result[rows.context_lens == 0].any()
    torch.testing.assert_close(result.float(), rows.expected(0.125), **tolerance(HALF))


def test_a_long_row_is_combined_from_more_parts_than_fit_at_once(device: torch.device) -> None:
    rows = make_rows([700], 16, 1, 256, 16, HALF, device)
    result = make_kernel(rows, 44, 16)(rows, 1 / 16)
    torch.testing.assert_close(result.float(), rows.expected(1 / 16), **tolerance(HALF))


def test_one_plan_serves_changing_lengths(device: torch.device) -> None:
    rows = make_rows([40, 80, 5], 2, 1, 64, 16, HALF, device)
    kernel = make_kernel(rows, 4, 16)
    for lengths in ([40, 80, 5], [1, 64, 0], [33, 2, 4]):
        now = dataclasses.replace(rows, lengths=lengths)
        now.context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        torch.testing.assert_close(kernel(now, 0.125).float(), now.expected(0.125), **tolerance(HALF))


def test_strided_queries_and_outputs(device: torch.device) -> None:
    rows = make_rows([40, 17], 2, 1, 64, 16, HALF, device)
    expected = make_kernel(rows, 4, 16)(rows, 0.125)
    wide = torch.zeros(2, 5, 64, dtype=HALF, device=device)
    wide[:, :2] = rows.query
    strided = dataclasses.replace(rows, query=wide[:, :2])
    assert torch.equal(make_kernel(strided, 4, 16)(strided, 0.125), expected)


def test_batch_invariant_rows_are_the_same_bits_in_any_batch(device: torch.device) -> None:
    lengths = [100, 33, 16, 0, 65]
    rows = make_rows(lengths, 4, 2, 64, 16, HALF, device)
    together = make_kernel(rows, 5, 16, split_tiles=2)(rows, 0.125)
    torch.testing.assert_close(together.float(), rows.expected(0.125), **tolerance(HALF))
    for row in range(len(lengths)):
        one = dataclasses.replace(
            rows,
            query=rows.query[row : row + 1],
            slots=rows.slots[row : row + 1],
            context_lens=rows.context_lens[row : row + 1],
        )
        assert torch.equal(make_kernel(one, 5, 16, split_tiles=2)(one, 0.125)[0], together[row])


def test_float8_cache_with_scales(device: torch.device) -> None:
    exact = make_rows([50, 17, 1], 4, 2, 64, 16, torch.float32, device)
    stored = exact.paged.cache / 0.5
    stored[:, 1] = exact.paged.cache[:, 1] / 0.25
    stored = stored.to(torch.float8_e4m3fn)
    rows = make_rows([50, 17, 1], 4, 2, 64, 16, HALF, device)
    rows.paged.cache = stored
    result = make_kernel(rows, 3, 16)(rows, 0.125, k_scale=0.5, v_scale=0.25)
    read = stored.float() * 0.5
    read[:, 1] = stored[:, 1].float() * 0.25
    rows.paged.cache = read
    torch.testing.assert_close(result.float(), rows.expected(0.125), **tolerance(HALF))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA graph")
def test_a_graph_replays_with_other_lengths(device: torch.device) -> None:
    rows = make_rows([900, 80, 5, 300], 8, 2, 128, 16, HALF, device)
    kernel = make_kernel(rows, 33, 64)
    output = torch.empty_like(rows.query)

    def run() -> None:
        plan_decode(kernel.plan, rows.slots, rows.context_lens)
        decode(
            rows.query, rows.paged.cache, rows.slots, rows.context_lens, rows.paged.block_tables, kernel.plan,
            kernel.workspace, output, 0.09, kernel.config,
        )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in ([900, 80, 5, 300], [1, 64, 0, 299], [512, 2, 4, 0]):
        rows.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = dataclasses.replace(rows, lengths=lengths).expected(0.09)
        torch.testing.assert_close(output.float(), expected, **tolerance(HALF))
