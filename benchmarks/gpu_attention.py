"""The attention kernels on a GPU: first right, then how fast, then with which configuration.

    OUT=/tmp/results PYTHONPATH=. python benchmarks/gpu_attention.py [--no-search] [--jobs 8]

Times are of CUDA graphs in which one launch follows another, each on the cache of another layer, so that no launch
finds its keys and values in the L2 cache. The column ``expected`` was written before the first run: for decode from the
bytes of the context at 3.8 TB/s plus 4.5 µs, for prefill from figures of like kernels. With OUT set, OUT/attention.json
holds every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np
import torch

from gpu_worker.attention.base import AttentionShape, KVScales
from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.kernels.attention_plan import DecodePlan, make_decode_plan, plan_decode
from gpu_worker.kernels.hopper_prefill import hopper_prefill
from gpu_worker.kernels.paged_decode import DecodeConfig, decode, decode_config, make_decode_workspace
from gpu_worker.kernels.paged_prefill import PrefillConfig, make_prefill_workspace, prefill
from gpu_worker.kernels.prefill_plan import has_pieces, prefill_items

LAUNCH_US = 4.5
EXPECTED_BYTES_PER_US = 3.8e6
COLD_BYTES = 300e6
"""Of keys and values between two uses of the same layer's: several times the L2 cache."""
Result = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


SMALL, LARGE = Shape("0.6B", 16), Shape("8B", 32)
LARGE_BLOCKS = Shape("0.6B bs64", 16, block_size=64)
DECODES = [(batch, context) for batch in (1, 8, 32, 256) for context in (128, 1024, 4096)]
DECODES += [(1, 8192), (8, 32768), (64, 8192)]
PREFILLS = [(1, 1024, 1024), (8, 1024, 1024), (1, 8192, 8192), (1, 2048, 16384), (8, 32, 4096)]
PREFILLS += [(1, 992, 4096), (1, 1120, 5000), (1, 1248, 4096), (1, 256, 8192), (1, 64, 65536)]
"""(spans, query tokens, context)."""
EXPECTED_TFLOPS = {
    "0.6B": (180, 330, 400, 410, 20, 380, 380, 380, 250, 250),
    "8B": (250, 350, 410, 420, 30, 400, 400, 400, 350, 350),
    "0.6B bs64": (190, 350, 420, 430, 20, 380, 380, 380, 250, 250),
}
SEARCHED_DECODES = [(256, 1024), (32, 4096), (64, 8192), (256, 128), (1, 1024), (8, 1024)]
DECODE_CONFIGS = [
    DecodeConfig(tile, warps, stages, programs)
    for tile, warps, stages, programs in (
        (64, 4, 3, 2), (64, 4, 3, 3), (64, 4, 2, 3), (64, 4, 4, 2), (64, 8, 3, 2), (32, 4, 3, 4), (32, 4, 4, 4),
        (32, 2, 3, 6), (32, 2, 4, 4), (128, 4, 2, 2), (128, 8, 2, 2), (128, 8, 3, 1),
    )
]  # fmt: skip
PREFILL_CONFIGS = [
    PrefillConfig(rows, keys, warps, stages, programs)
    for rows, keys, warps, stages, programs in (
        (128, 64, 8, 3, 1), (128, 64, 8, 2, 1), (128, 128, 8, 2, 1), (64, 64, 4, 3, 2), (64, 64, 4, 2, 2),
        (64, 128, 4, 2, 1), (128, 64, 4, 3, 1), (128, 32, 8, 3, 1), (64, 64, 4, 2, 1),
    )
]  # fmt: skip


class Caches:
    """Paged caches of several layers with the same block tables."""

    def __init__(self, contexts: list[int], shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        blocks = [-(-context // shape.block_size) for context in contexts]
        block_bytes = 2 * shape.kv_heads * shape.block_size * shape.head_dim * dtype.itemsize
        self.num_layers = min(32, max(2, math.ceil(COLD_BYTES / (sum(blocks) * block_bytes))))
        size = (self.num_layers, 1 + sum(blocks), 2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.layers = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_().to(dtype)
        generator = torch.Generator().manual_seed(0)
        order = (torch.randperm(sum(blocks), generator=generator) + 1).int()
        tables = torch.zeros((len(contexts), max(blocks)), dtype=torch.int32)
        for slot, (end, count) in enumerate(zip(np.cumsum(blocks).tolist(), blocks, strict=True)):
            tables[slot, :count] = order[end - count : end]
        self.tables = tables.cuda()
        self.slots = torch.arange(len(contexts), dtype=torch.int32, device="cuda")
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device="cuda")


def make_backend(shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype) -> TritonPagedAttention:
    attention = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
    return TritonPagedAttention(
        attention, torch.device("cuda"), dtype=dtype, cache_dtype=cache_dtype, max_rows=256, max_context=131072
    )


def graph_us(launch: Callable[[int], None], launches: int, repeats: int = 5) -> float:
    """Microseconds of one launch, the fastest replay of a graph of them."""
    launch(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    graph.replay()
    best = math.inf
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1000 / launches


# -- decode ----------------------------------------------------------------------------------------------------------


class DecodeBench:
    """One shape and one set of contexts."""

    def __init__(self, shape: Shape, contexts: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.caches = shape, Caches(contexts, shape, dtype)
        rows = (len(contexts), shape.heads, shape.head_dim)
        self.query = torch.randn(rows, dtype=torch.bfloat16, device="cuda")
        self.output = torch.empty_like(self.query)
        self.num_bytes = 2 * sum(contexts) * shape.kv_heads * shape.head_dim * dtype.itemsize

    def make_plan(self, config: DecodeConfig, split_tiles: int = 0) -> DecodePlan:
        programs = num_sms() * config.programs_per_sm // self.shape.kv_heads
        return make_decode_plan(
            programs, max(256, len(self.query)), config.tile, self.query.device, split_tiles=split_tiles
        )

    def time(self, config: DecodeConfig, split_tiles: int = 0) -> tuple[float, float]:
        """Microseconds of a layer, and of the plan."""
        plan, caches, shape = self.make_plan(config, split_tiles), self.caches, self.shape
        slots = 2 * len(plan.programs) if not split_tiles else 32 * len(self.query)
        rows = max(256, len(self.query))
        workspace = make_decode_workspace(slots, rows, shape.heads, shape.kv_heads, shape.head_dim, self.query.device)
        plan_decode(plan, caches.slots, caches.contexts)

        def launch(index: int) -> None:
            cache = caches.layers[index % caches.num_layers]
            decode(
                self.query, cache, caches.slots, caches.contexts, caches.tables, plan, workspace, self.output,
                shape.head_dim**-0.5, config,
            )  # fmt: skip

        layer = graph_us(launch, max(8, caches.num_layers))
        return layer, graph_us(lambda _: plan_decode(plan, caches.slots, caches.contexts), 16)


def lognormal_contexts(batch: int) -> list[int]:
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, batch)
    return np.clip(lengths, 16, 8192).astype(int).tolist()


def decode_rows(results: list[Result]) -> None:
    print(f"{'decode':34}{'us':>9}{'expected':>10}{'TB/s':>8}{'plan us':>9}")
    cases = [(f"{batch} x {context}", [context] * batch, torch.bfloat16) for batch, context in DECODES]
    cases += [(f"{batch} lognormal", lognormal_contexts(batch), torch.bfloat16) for batch in (32, 256)]
    cases += [(f"{batch} x 1024 fp8", [1024] * batch, torch.float8_e4m3fn) for batch in (32, 256)]
    for shape in (SMALL, LARGE):
        for name, contexts, dtype in cases:
            bench = DecodeBench(shape, contexts, dtype)
            config = decode_config(shape.head_dim, dtype)
            layer, plan = bench.time(config)
            expected = LAUNCH_US + bench.num_bytes / (EXPECTED_BYTES_PER_US * (0.8 if dtype.itemsize == 1 else 1))
            report(results, f"decode {shape.name} {name}", layer, expected, bench.num_bytes / layer / 1e6, plan)
        bench = DecodeBench(shape, [1024] * 256)
        config = decode_config(shape.head_dim, torch.bfloat16)
        layer, plan = bench.time(config, split_tiles=1024 // config.tile)
        expected = LAUNCH_US + 1.1 * bench.num_bytes / EXPECTED_BYTES_PER_US
        name = f"decode {shape.name} 256 x 1024 invariant"
        report(results, name, layer, expected, bench.num_bytes / layer / 1e6, plan)

    for batch, context in ((1, 1024), (32, 4096), (256, 1024)):
        bench = DecodeBench(LARGE_BLOCKS, [context] * batch)
        layer, plan = bench.time(decode_config(LARGE_BLOCKS.head_dim, torch.bfloat16))
        expected = LAUNCH_US + bench.num_bytes / EXPECTED_BYTES_PER_US
        name = f"decode {LARGE_BLOCKS.name} {batch} x {context}"
        report(results, name, layer, expected, bench.num_bytes / layer / 1e6, plan)


def report(results: list[Result], name: str, value: float, expected: float, rate: float, plan: float) -> None:
    print(f"{name:34}{value:9.1f}{expected:10.1f}{rate:8.2f}{plan:9.1f}", flush=True)
    results.append({"case": name, "us": value, "expected_us": expected, "tb_per_s": rate, "plan_us": plan})


# -- prefill ---------------------------------------------------------------------------------------------------------


class PrefillBench:
    """One shape and equal spans."""

    def __init__(self, shape: Shape, spans: int, tokens: int, context: int) -> None:
        self.shape, self.caches = shape, Caches([context] * spans, shape)
        self.query = torch.randn((spans * tokens, shape.heads, shape.head_dim), dtype=torch.bfloat16, device="cuda")
        self.output = torch.empty_like(self.query)
        self.spans = np.array([(s, s * tokens, tokens, context) for s in range(spans)], np.int32)
        pairs = spans * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
        self.flops = 4 * shape.heads * shape.head_dim * pairs
        self.backend = make_backend(shape, self.query.dtype, self.query.dtype)

    def default(self) -> PrefillConfig:
        return self.backend.cut_prefill(self.spans).config

    def time(self, config: PrefillConfig) -> float:
        caches, shape = self.caches, self.shape
        workspace = make_prefill_workspace(shape.kv_heads, num_sms(), self.query.device)
        cut = self.backend.tile_cut(config)
        table = prefill_items(self.spans, cut)
        items = torch.from_numpy(table).cuda()

        def launch(index: int) -> None:
            arrays = self.query, caches.layers[index % caches.num_layers], items, caches.tables, self.output
            scale, programs = shape.head_dim**-0.5, cut.programs if has_pieces(table) else None
            if config.is_hopper:
                hopper_prefill(*arrays, scale, cut.programs, programs is not None, workspace)
            else:
                prefill(*arrays, scale, None, config, programs, workspace)

        return graph_us(launch, 8)


def prefill_rows(results: list[Result]) -> None:
    print(f"{'prefill':34}{'us':>9}{'TFLOP/s':>10}{'expected':>10}")
    for shape in (SMALL, LARGE, LARGE_BLOCKS):
        for (spans, tokens, context), expected in zip(PREFILLS, EXPECTED_TFLOPS[shape.name], strict=True):
            bench = PrefillBench(shape, spans, tokens, context)
            layer = bench.time(bench.default())
            name, rate = f"prefill {shape.name} {spans} x {tokens} at {context}", bench.flops / layer / 1e6
            print(f"{name:34}{layer:9.1f}{rate:10.0f}{expected:10}", flush=True)
            results.append({"case": name, "us": layer, "tflop_per_s": rate, "expected_tflop_per_s": expected})


# -- configurations --------------------------------------------------------------------------------------------------


def compile_config(config: DecodeConfig | PrefillConfig) -> str | None:
    """Compile a configuration in a process of its own, for Triton's cache; the words of an error, or None."""
    try:
        for shape in (SMALL, LARGE):
            if isinstance(config, DecodeConfig):
                DecodeBench(shape, [64]).time(config)
            else:
                PrefillBench(shape, 1, 64, 64).time(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compile_others(shape: Shape) -> None:
    """The kernels of ``decode_rows`` that have no configuration of their own."""
    for dtype, split_tiles in ((torch.bfloat16, 1024 // 64), (torch.float8_e4m3fn, 0), (torch.bfloat16, 0)):
        DecodeBench(shape, [64], dtype).time(decode_config(shape.head_dim, dtype), split_tiles)
    for config in PREFILL_CONFIGS if shape == LARGE_BLOCKS else ():
        PrefillBench(shape, 1, 64, 64).time(config)


def search(results: list[Result], configs: list[DecodeConfig | PrefillConfig]) -> None:
    """Rank those configurations for every case."""
    for shape in (SMALL, LARGE):
        for batch, context in SEARCHED_DECODES:
            decodes = DecodeBench(shape, [context] * batch)
            times = {c: decodes.time(c)[0] for c in configs if isinstance(c, DecodeConfig)}
            ranking(results, f"decode {shape.name} {batch} x {context}", times)
        decodes = DecodeBench(shape, lognormal_contexts(256))
        times = {c: decodes.time(c)[0] for c in configs if isinstance(c, DecodeConfig)}
        ranking(results, f"decode {shape.name} 256 lognormal", times)
        for spans, tokens, context in PREFILLS:
            prefills = PrefillBench(shape, spans, tokens, context)
            by_config = {c: prefills.time(c) for c in configs if isinstance(c, PrefillConfig)}
            ranking(results, f"prefill {shape.name} {spans} x {tokens} at {context}", by_config)


def ranking(results: list[Result], name: str, times: dict[DecodeConfig, float] | dict[PrefillConfig, float]) -> None:
    """Print the configurations of a case, fastest first."""
    ranked = sorted((us, tuple(dataclasses.astuple(config))) for config, us in times.items())
    print(f"{name:34}", "  ".join(f"{'/'.join(map(str, config))}: {us:.1f}" for us, config in ranked), flush=True)
    results.append({"case": f"search {name}", "ranking": ranked})


# -- correctness -----------------------------------------------------------------------------------------------------


def worst_error(shape: Shape, spans: list[tuple[int, int]], dtype: torch.dtype, window: int | None) -> float:
    """The largest relative error (to the largest result) of a mixed step against float32 over the gathered context.

    Args:
        spans: (query tokens, context); those of one token are decode rows and come last.
    """
    caches = Caches([context for _, context in spans], shape, dtype)
    model_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    backend = make_backend(shape, model_dtype, dtype)
    starts = np.cumsum([0, *(count for count, _ in spans)])
    long = [i for i, (count, _) in enumerate(spans) if count > 1]
    cut = backend.cut_prefill(np.array([(i, starts[i], *spans[i]) for i in long], np.int32))
    metadata = backend.prepare_mixed(
        cut, torch.from_numpy(cut.table).cuda(), int(starts[len(long)]), caches.slots[len(long) :],
        caches.contexts[len(long) :], caches.tables,
    )  # fmt: skip
    query = torch.randn((int(starts[-1]), shape.heads, shape.head_dim), dtype=model_dtype, device="cuda")
    result = backend.attend(query, caches.layers[0], metadata, shape.head_dim**-0.5, window, KVScales()).float()
    worst = 0.0
    for slot, (count, context) in enumerate(spans):
        blocks = caches.tables[slot, : -(-context // shape.block_size)].long()
        keys, values = caches.layers[0][blocks].float().permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
        expected = reference(query[starts[slot] : starts[slot] + count].float(), keys, values, window)
        got = result[starts[slot] : starts[slot] + count]
        worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
        if not torch.isfinite(got).all():
            return math.inf
    return worst


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """[tokens, heads * head_dim] float32."""
    tokens, heads, head_dim = query.shape
    group = heads // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * head_dim**-0.5
    token = torch.arange(keys.shape[1], device=query.device)
    position = token[-tokens:, None]
    hidden = token > position
    if window is not None:
        hidden |= token <= position - window
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)


HALF, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
CHECKED = [
    (SMALL, HALF, None), (LARGE, HALF, None), (LARGE, torch.float16, None), (LARGE, HALF, 500),
    (LARGE, FLOAT8, None), (Shape("d64 mha", 8, 8, 64), HALF, None), (Shape("d64 7:1", 14, 2, 64), HALF, None),
    (Shape("d80", 8, 8, 80), HALF, None), (Shape("d96", 12, 4, 96), HALF, None),
    (Shape("d256", 16, 4, 256), HALF, None), (Shape("fp32", 4, 2, 64), torch.float32, None),
]  # fmt: skip
CHECKED_SPANS = [(300, 300), (1000, 1500), (33, 2000), (1, 1), (1, 64), (1, 65), (1, 1000), (1, 8000)]


def check(shape: Shape, dtype: torch.dtype, window: int | None) -> Result:
    """Compare a shape with the reference."""
    name = f"correct {shape.name} {str(dtype).removeprefix('torch.')} window {window}"
    try:
        error = worst_error(shape, CHECKED_SPANS, dtype, window)
    except Exception as problem:
        print(f"WRONG: {name}: {type(problem).__name__}: {problem}", flush=True)
        return {"case": name, "error": math.inf, "is_right": False}
    is_right = error < (1e-4 if dtype == torch.float32 else 1e-2)
    print(f"{'right' if is_right else 'WRONG'}: {name}: relative error {error:.1e}", flush=True)
    return {"case": name, "error": error, "is_right": is_right}


def num_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-search", action="store_true", help="only the default configurations")
    parser.add_argument("--jobs", type=int, default=12, help="processes that check and compile")
    options = parser.parse_args()
    started = time.perf_counter()
    results: list[Result] = []

    def save(section: str) -> None:
        print(f"-- {section}: {time.perf_counter() - started:.0f} s", flush=True)
        if "OUT" in os.environ:
            pathlib.Path(os.environ["OUT"], "attention.json").write_text(json.dumps(results, indent=1))

    configs: list[DecodeConfig | PrefillConfig] = [*DECODE_CONFIGS, *PREFILL_CONFIGS]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        others = pool.map_async(compile_others, [SMALL, LARGE, LARGE_BLOCKS], chunksize=1)
        checks = pool.starmap_async(check, CHECKED, chunksize=1)
        errors = pool.map(compile_config, configs, chunksize=1)
        results += checks.get()
        others.get()
    for config, error in zip(configs, errors, strict=True):
        if error:
            print(f"{config}: {error[:200]}")
    save("checked and compiled")
    decode_rows(results)
    save("decode")
    prefill_rows(results)
    save("prefill")
    if not options.no_search:
        search(results, [config for config, error in zip(configs, errors, strict=True) if not error])
        save("configurations")


if __name__ == "__main__":
    main()
