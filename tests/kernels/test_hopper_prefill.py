"""Prefill attention for Hopper: compiled everywhere, and run where there is such a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.attention.base import AttentionShape
from gpu_worker.attention.triton_paged import _hopper_prefill
from gpu_worker.kernels.compile_ahead import compiled_ahead
from gpu_worker.kernels.hopper_prefill import BLOCK_SIZES, STAGES, can_run, hopper_prefill
from gpu_worker.kernels.paged_prefill import HOPPER_KEYS, HOPPER_ROWS, make_prefill_workspace, prefill_config
from gpu_worker.kernels.prefill_plan import TileCut, has_pieces, prefill_items
from tests.kernels.attention_reference import attend, make_paged, tolerance

PROGRAM = Path(__file__).with_name("hopper_compile_program.py")
ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
EDGES = [(300, 300), (1, 1), (129, 700), (128, 128), (32, 4096), (257, 513), (127, 127), (5, 1025)]
"""(query tokens, context) of spans."""


def compiled(*arguments: int) -> dict[str, int]:
    """What the kernel is made of."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    run = subprocess.run(command, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, int] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    ("head_dim", "block_size", "pieces"),
    [
        (128, 16, True),
        pytest.param(128, 64, False, marks=pytest.mark.slow),
        pytest.param(64, 128, True, marks=pytest.mark.slow),
    ],
)
def test_it_compiles(head_dim: int, block_size: int, pieces: bool) -> None:
    found = compiled(head_dim, block_size, int(pieces))
    assert found["shared"] <= SHARED_BYTES
    assert found["setmaxnreg"] > 0
    assert found["bar.arrive"] > 0
    # Both groups: scores of a first tile, scores and values of masked and of other tiles, values of the last one.
    assert found["wgmma.mma_async"] >= 2 * 6
    # Keys and values, each dimension panel of each block.
    assert found["cp.async.bulk.tensor"] == 2 * (head_dim // 64) * (HOPPER_KEYS // block_size)


def run(
    spans: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    max_pieces: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    times: int = 5,
) -> int:
    """Attend over spans whose query is a part of wider rows, and compare with the reference and with itself.

    Returns:
        The pieces of contexts that were cut.
    """
    device = torch.device("cuda")
    assert can_run(head_dim, block_size, dtype, dtype)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = make_prefill_workspace(kv_heads, num_sms, device)
    workspace.values.fill_(torch.nan)
    paged = make_paged([context for _, context in spans], kv_heads, head_dim, block_size, dtype, device)
    starts = np.cumsum([0, *(count for count, _ in spans)])
    table = np.array([(slot, starts[slot], *span) for slot, span in enumerate(spans)], np.int32)
    pieces = workspace.max_pieces if max_pieces is None else max_pieces
    items = prefill_items(table, TileCut(HOPPER_ROWS // group, kv_heads, num_sms, HOPPER_KEYS, pieces))
    on_device, heads = torch.from_numpy(items).to(device), group * kv_heads
    fused = torch.randn(int(starts[-1]) + 3, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    query, scale = fused[:, :heads], head_dim**-0.5
    outputs = [torch.full((len(fused), heads * head_dim), 7.0, dtype=dtype, device=device) for _ in range(times)]
    for output in outputs:
        hopper_prefill(
            query, paged.cache, on_device, paged.block_tables, output, scale, num_sms, has_pieces(items), workspace
        )  # fmt: skip
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=0)
    assert not workspace.arrivals.any()
    assert (outputs[0][starts[-1] :] == 7.0).all()
    for slot, (count, context) in enumerate(spans):
        some = slice(int(starts[slot]), int(starts[slot]) + count)
        expected = attend(query[some], *paged.context(slot, context), scale).flatten(1)
        torch.testing.assert_close(outputs[0][some].float(), expected, **tolerance(dtype))
    return int((items[1:, 6] > 1).sum())


@needs_hopper
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group"), list(itertools.product(STAGES, BLOCK_SIZES, (1, 4, 7, 16)))
)
def test_whole_contexts_equal_the_reference(head_dim: int, block_size: int, group: int) -> None:
    assert run(EDGES, group, 2, head_dim, block_size, max_pieces=0) == 0


@needs_hopper
@pytest.mark.parametrize("context", [*range(126, 131), 2047, 2049])
def test_lengths_at_the_edges_of_tiles(context: int) -> None:
    run([(context, context), (min(context, 33), context), (1, context)], 4, 8, 128, 16)


@needs_hopper
@pytest.mark.parametrize("head_dim", STAGES)
@pytest.mark.parametrize("spans", [[(1120, 5000)], [(64, 20_001)], [(700, 3001), (65, 127)]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contexts_in_pieces_equal_the_reference(
    head_dim: int, spans: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    assert run(spans, 4, 8, head_dim, 16, dtype=dtype) > 1


@needs_hopper
def test_a_graph_takes_what_items_it_finds() -> None:
    """One that was compiled ahead, too, and an empty table of items."""
    device, spans, group, kv_heads = torch.device("cuda"), [(300, 1300), (90, 90)], 4, 8
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = make_prefill_workspace(kv_heads, num_sms, device)
    paged = make_paged([context for _, context in spans], kv_heads, 64, 32, torch.bfloat16, device)
    query = torch.randn(390, group * kv_heads, 64, dtype=torch.bfloat16, device=device)
    output = torch.full_like(query, 7.0)
    cut = TileCut(HOPPER_ROWS // group, kv_heads, num_sms, HOPPER_KEYS, workspace.max_pieces)
    items = prefill_items(np.array([(0, 0, 300, 1300), (1, 300, 90, 90)], np.int32), cut)
    there = torch.zeros(len(items) + 40, items.shape[1], dtype=torch.int32, device=device)

    def launch() -> None:
        hopper_prefill(query, paged.cache, there, paged.block_tables, output, 0.125, num_sms, True, workspace)

    with compiled_ahead(2):
        launch()
    assert (output == 7.0).all()
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    assert (output == 7.0).all()
    there[: len(items)] = torch.from_numpy(items).to(device)
    graph.replay()
    for slot, some in enumerate((slice(0, 300), slice(300, 390))):
        expected = attend(query[some], *paged.context(slot, spans[slot][1]), 0.125)
        torch.testing.assert_close(output[some].float(), expected, **tolerance(torch.bfloat16))


def test_what_it_is_chosen_for() -> None:
    bfloat16, shape = torch.bfloat16, AttentionShape(32, 8, 128, 16)
    assert _hopper_prefill(shape, bfloat16, bfloat16, torch.device("cpu")) is None
    assert can_run(128, 16, bfloat16, bfloat16)
    assert not can_run(128, 16, bfloat16, torch.float8_e4m3fn)
    assert not can_run(80, 16, bfloat16, bfloat16)
    assert not can_run(128, 48, bfloat16, bfloat16)
    config = prefill_config(128, bfloat16, 4480, 4480, 8, 132, has_hopper=True)
    assert (config.is_hopper, config.rows, config.piece_keys) == (True, HOPPER_ROWS, HOPPER_KEYS)
    assert not prefill_config(128, bfloat16, 64, 4480, 8, 132, has_hopper=True).is_hopper
    assert not prefill_config(128, bfloat16, 4480, 4480, 8, 132).is_hopper
