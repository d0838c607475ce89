"""The kernels beside matrix products and attention on a GPU: right, and how long they take.

    python benchmarks/gpu_layers.py --out "$OUT"

Each kernel's result is compared with torch operations, then it is timed in a CUDA graph of many launches. The operands
stay where the launches leave them, mostly in the L2 cache, as in a model, where the kernel before has just written
them: figures above the bandwidth of device memory are no error. ``<out>/layers.json`` gets the times.

Without a GPU, ``TRITON_INTERPRET=1 python benchmarks/gpu_layers.py --rows 1 8`` runs the comparisons alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gpu_worker.kernels.activation import silu_mul
from gpu_worker.kernels.block_copy import block_copy
from gpu_worker.kernels.norm import add_rms_norm, rms_norm
from gpu_worker.kernels.rope_kv import rotate_and_write
from gpu_worker.kernels.state_kernels import gather_decode_inputs, gather_span_inputs, write_back
from gpu_worker.layers.norm import HeadNorm
from gpu_worker.layers.rotary import FixedTable, apply_rotary

BANDWIDTH = 4.27e12
"""Bytes a second that a device copy moves on an H200."""
LAUNCH = 2.0
"""Microseconds of a small kernel in a graph, the gap to the next included."""
EPS = 1e-6
DTYPE = torch.bfloat16
BLOCK_SIZE = 16
MAX_LEN = 8192
ROUNDING = 2.0**-8 if torch.cuda.is_available() else 2.0**-7
"""Of bfloat16; the interpreter cuts it off."""


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool


MODELS = [
    Model("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, True),
    Model("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, False),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel with its operands.

    Attributes:
        count: launches in a step.
        nbytes: read and written by one launch.
        run: launch it.
        check: raise if its result is wrong; the operands may change.
    """

    name: str
    count: int
    nbytes: int
    run: Callable[[], object]
    check: Callable[[], None]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=ROUNDING, atol=1e-5)


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.long(), expected.long(), rtol=0, atol=0)


def norms(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    hidden, delta = torch.randn(rows, model.hidden, device=device), torch.randn(rows, model.hidden, device=device)
    delta, weight = (delta / 64).to(DTYPE), torch.rand(model.hidden, device=device) + 0.5

    def check() -> None:
        close(rms_norm(hidden, weight, EPS, DTYPE), F.rms_norm(hidden, weight.shape, weight, EPS))
        total = hidden + delta
        normed = add_rms_norm(hidden, delta, weight, EPS, DTYPE)
        assert torch.equal(hidden, total)
        close(normed, F.rms_norm(total, weight.shape, weight, EPS))

    nbytes = hidden.numel() * 12 + weight.numel() * 4
    yield Case("add_norm", 2 * model.layers, nbytes, lambda: add_rms_norm(hidden, delta, weight, EPS, DTYPE), check)


def activations(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    gate_up = torch.randn(rows, 2 * model.intermediate, device=device).to(DTYPE)

    def check() -> None:
        gate, up = gate_up.float().chunk(2, -1)
        close(silu_mul(gate_up), F.silu(gate) * up)

    yield Case("silu_mul", model.layers, gate_up.numel() * 3, lambda: silu_mul(gate_up), check)


def rotations(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device).to(DTYPE)
    q_weight, k_weight = torch.rand(2, head_dim, device=device) + 0.5
    head_norm = HeadNorm(q_weight, k_weight, heads, kv_heads, EPS) if model.qk_norm else None
    weights = head_norm.weights if head_norm else None
    angles = torch.rand(MAX_LEN, 1, head_dim // 2, device=device) * 6
    table = FixedTable(angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], -1))
    positions = torch.randint(MAX_LEN, (rows,), dtype=torch.int32, device=device)
    cos, sin = table(positions, positions)
    blocks = max(64, rows)
    cache = torch.zeros(blocks, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=DTYPE, device=device)
    mapping = torch.randperm(blocks * BLOCK_SIZE, device=device)[:rows].int()

    def run() -> torch.Tensor:
        return rotate_and_write(qkv, weights, EPS, cos, sin, cache, mapping)

    def check() -> None:
        by_head = qkv.view(rows, -1, head_dim).float()
        exact = by_head[:, : heads + kv_heads]
        rotated = apply_rotary(head_norm(exact) if head_norm else exact, cos, sin)
        close(run(), rotated[:, :heads])
        block, offset = mapping.long() // BLOCK_SIZE, mapping.long() % BLOCK_SIZE
        close(cache[block, 0, :, offset], rotated[:, heads:])
        assert torch.equal(cache[block, 1, :, offset].float(), by_head[:, heads + kv_heads :])

    nbytes = 2 * qkv.numel() * DTYPE.itemsize + cos.numel() * 4
    yield Case("rotate_and_write", model.layers, nbytes, run, check)
    yield Case("cos_sin", 1, 4 * cos.numel() * 4, lambda: table(positions, positions), lambda: None)


def states(rows: int, device: torch.device) -> Iterator[Case]:
    """The state of ``rows`` requests; a span of them all for the prefill."""
    lengths = torch.randint(1, MAX_LEN, (rows + 1,), device=device)
    lengths[rows] = 0
    token_ids = torch.randint(100_000, (rows + 1, MAX_LEN), dtype=torch.int32, device=device)
    tables = torch.randint(1, 10_000, (rows + 1, MAX_LEN // BLOCK_SIZE), dtype=torch.int32, device=device)
    num_tokens, limit = lengths.int(), torch.full((rows + 1,), MAX_LEN, dtype=torch.int32, device=device)
    slots, limit[rows] = torch.randperm(rows + 1, device=device)[:rows].int(), 0
    spans = torch.tensor([[0, 0, rows, 0]], dtype=torch.int32, device=device)
    sampled = torch.randint(100_000, (rows,), dtype=torch.int32, device=device)

    def decode() -> tuple[torch.Tensor, ...]:
        return gather_decode_inputs(slots, token_ids, num_tokens, tables, BLOCK_SIZE)

    def span() -> tuple[torch.Tensor, ...]:
        return gather_span_inputs(spans, rows, rows, token_ids, num_tokens, num_tokens, tables, BLOCK_SIZE)

    def check_decode() -> None:
        at, length = slots.long(), num_tokens[slots.long()].long()
        live, position = length > 0, (length - 1).clamp_min(0)
        mapping = tables[at, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        wanted = [torch.where(live, token_ids[at, position], 0), position, length, torch.where(live, mapping, -1)]
        for actual, expected in zip(decode(), wanted, strict=True):
            equal(actual, expected)

    def check_span() -> None:
        position = torch.arange(rows, device=device)
        ids, positions, _, mapping = span()
        equal(ids, token_ids[0, :rows])
        equal(positions, position)
        equal(mapping, tables[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE)

    def check_write() -> None:
        at, before = slots.long(), num_tokens.clone()
        write_back(slots, sampled, token_ids, num_tokens, limit)
        room = before[at] < limit[at]
        equal(num_tokens[at], before[at] + room)
        equal(token_ids[at, before[at].long()][room], sampled[room])

    yield Case("gather_decode_inputs", 1, 32 * rows, decode, check_decode)
    yield Case("gather_span_inputs", 0, 24 * rows, span, check_span)
    yield Case(
        "write_back", 1, 24 * rows, lambda: write_back(slots, sampled, token_ids, num_tokens, limit), check_write
    )


def copies(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    """A block for each of the rows, 256 at most."""
    pairs = min(rows, 256)
    shape = (model.layers, 2 * pairs, 2, model.kv_heads, BLOCK_SIZE, model.head_dim)
    cache = torch.randn(shape, dtype=DTYPE, device=device)
    table = torch.randperm(2 * pairs, device=device).int().view(pairs, 2)

    def check() -> None:
        block_copy(cache, table)
        assert torch.equal(cache[:, table[:, 0].long()], cache[:, table[:, 1].long()])

    yield Case("block_copy", 0, cache.numel() * DTYPE.itemsize, lambda: block_copy(cache, table), check)


def microseconds(run: Callable[[], object], launches: int = 50, replays: int = 6) -> float:
    """Of one launch in a graph of many; the fastest replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / launches)
    return best


def measure(model: Model, rows: int, device: torch.device) -> list[dict[str, Any]]:
    """Check every kernel, and time it if there is a GPU."""
    makers = [norms, activations, rotations, copies]
    cases = [case for make in makers for case in make(model, rows, device)] + list(states(rows, device))
    found = []
    for case in cases:
        case.check()
        line = f"{model.name:13} {rows:5} {case.name:21} right"
        if device.type == "cuda":
            expected, took = max(LAUNCH, 1e6 * case.nbytes / BANDWIDTH), microseconds(case.run)
            rate = case.nbytes / took / 1e3
            found.append(
                {"model": model.name, "rows": rows, "kernel": case.name, "count": case.count, "us": took}
                | {"expected_us": expected, "GB/s": rate}
            )
            line += f" {took:8.2f} us, expected {expected:8.2f}, {rate:7.0f} GB/s"
        print(line, flush=True)
    if found:
        total = sum(row["us"] * row["count"] for row in found) / 1e3
        print(f"{model.name:13} {rows:5} {'a step of these':21} {total:14.3f} ms", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder for layers.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256, 2048])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    start = time.perf_counter()
    with torch.inference_mode():
        found = [row for model in MODELS for rows in options.rows for row in measure(model, rows, device)]
    print(f"{time.perf_counter() - start:.1f} s")
    if options.out and found:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        (options.out / "layers.json").write_text(json.dumps({**about, "kernels": found}, indent=1))


if __name__ == "__main__":
    main()
