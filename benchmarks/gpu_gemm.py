"""The matrix products of a decode step on a GPU: cuBLAS against the Triton kernels, for few tokens.

    python benchmarks/gpu_gemm.py --out "$OUT" --write-choices

Every product is timed in a CUDA graph whose weights take turns, more of them than the L2 cache holds, so that they come
from device memory as they do in a model. Every kernel's result is compared with the float32 product first.

``<out>/gemm.json`` gets the times; ``<out>/gemm_choices.json`` the table of ``gpu_worker/layers`` with this device's
choices put in, which ``--write-choices`` also writes back to where the worker reads it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.kernels.gemm import KernelError, compiled_together
from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig, encode_choice
from gpu_worker.layers.gemm_choice import BUCKETS, SHIPPED, GemmShape, invariant_config, rule
from gpu_worker.layers.gemm_tuning import GemmTimer, candidates, fastest

BANDWIDTH = 4.27e12
"""Bytes a second that a device copy moves on an H200."""
FLOPS = 650e12
"""Operations a second that large bfloat16 products reach there."""
GAP = 1.5
"""Microseconds from the end of a kernel in a graph to the useful work of the next."""

EXPECTED_STEPS = {
    ("qwen3-0.6b", 1): (0.99, 0.58),
    ("qwen3-0.6b", 8): (0.95, 0.70),
    ("qwen3-0.6b", 32): (0.81, 0.76),
    ("qwen3-0.6b", 256): (0.95, 0.95),
    ("llama-3.1-8b", 1): (4.21, 4.01),
    ("llama-3.1-8b", 8): (4.4, 4.32),
    ("llama-3.1-8b", 32): (4.43, 4.43),
    ("llama-3.1-8b", 256): (7.04, 7.04),
}
"""Milliseconds of all products of a step that were measured before: cuBLAS, and the fastest of all kernels."""

TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Relative to the largest value; half a unit in the last place of a bfloat16 result is 2^-9."""


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def products(self) -> list[tuple[str, int, GemmShape]]:
        """(name, times in a step, shape) of every product of a decode step."""

        def shape(out_features: int, in_features: int, out_dtype: torch.dtype = torch.bfloat16) -> GemmShape:
            return GemmShape(out_features, in_features, torch.bfloat16, out_dtype)

        return [
            ("qkv", self.layers, shape((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden)),
            ("o", self.layers, shape(self.hidden, self.heads * self.head_dim)),
            ("gate_up", self.layers, shape(2 * self.intermediate, self.hidden)),
            ("down", self.layers, shape(self.hidden, self.intermediate)),
            ("lm_head", 1, shape(self.vocab, self.hidden, torch.float32)),
        ]


MODELS = [
    Model("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936),
    Model("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
]


def expected_microseconds(shape: GemmShape, tokens: int) -> float:
    flops = 2 * tokens * shape.out_features * shape.in_features
    return 1e6 * max(shape.nbytes / BANDWIDTH, flops / FLOPS) + GAP


def everything_tried(shape: GemmShape, tokens: int) -> list[GemmChoice]:
    """The candidates, what the rule takes where nothing was measured, and the batch-invariant kernel."""
    return list(dict.fromkeys([*candidates(shape, tokens), rule(shape, tokens), invariant_config(shape)]))


def measure(timer: GemmTimer, shape: GemmShape, tokens: int) -> dict[GemmChoice, float]:
    """Microseconds by choice.

    Raises:
        SystemExit: a kernel computes something else.
    """
    times = {}
    for choice in everything_tried(shape, tokens):
        try:
            error = timer.error(shape, tokens, choice)
            if choice is not None and not error <= TOLERANCE[shape.out_dtype]:
                raise SystemExit(f"{shape.key}, {tokens} tokens, {choice}: relative error {error:.2e}")
            times[choice] = timer.microseconds(shape, tokens, choice)
        except KernelError as problem:
            print(f"left out: {shape.key}, {tokens} tokens, {choice}: {problem}")
    return times


def compile_all(timer: GemmTimer, models: list[Model], buckets: list[int], threads: int) -> None:
    start = time.perf_counter()
    with compiled_together(threads):
        for shape in dict.fromkeys(shape for model in models for _, _, shape in model.products()):
            for tokens in buckets:
                for choice in everything_tried(shape, tokens):
                    timer.compile(shape, tokens, choice)
    print(f"kernels compiled in {time.perf_counter() - start:.1f} s")


def least(times: dict[GemmChoice, float], kind: type[GemvConfig] | type[SplitKConfig]) -> float | None:
    return min((time for choice, time in times.items() if isinstance(choice, kind)), default=None)


def measure_model(timer: GemmTimer, model: Model, buckets: list[int]) -> list[dict[str, Any]]:
    print(f"\n{model.name}: microseconds a product")
    print("product    tokens  expected   cublas     gemv  split_k     rule invariant  fastest")
    rows: list[dict[str, Any]] = []
    for name, count, shape in model.products():
        for tokens in buckets:
            times = measure(timer, shape, tokens)
            chosen = fastest({choice: times[choice] for choice in candidates(shape, tokens) if choice in times})
            row = {
                "model": model.name,
                "product": name,
                "count": count,
                "shape": shape.key,
                "tokens": tokens,
                "expected_us": expected_microseconds(shape, tokens),
                "cublas_us": times[None],
                "gemv_us": least(times, GemvConfig),
                "split_k_us": least(times, SplitKConfig),
                "rule_us": times.get(rule(shape, tokens)),
                "invariant_us": times.get(invariant_config(shape)),
                "fastest_us": times[chosen],
                "fastest": encode_choice(chosen),
                "all": [[*encode_choice(choice), time] for choice, time in sorted(times.items(), key=lambda t: t[1])],
            }
            rows.append(row)
            figures = (row[f"{column}_us"] for column in ("expected", "cublas", "gemv", "split_k", "rule", "invariant"))
            cells = " ".join(f"{figure:8.2f}" if figure is not None else f"{'-':>8}" for figure in figures)
            print(
                f"{name:10} {tokens:6}  {cells}   {' '.join(str(part) for part in encode_choice(chosen))}", flush=True
            )
    return rows


def print_steps(rows: list[dict[str, Any]], buckets: list[int]) -> list[dict[str, Any]]:
    """Print and return the milliseconds of all products of a step."""
    print("\nmilliseconds of all products of a step (expected: cuBLAS / fastest)")
    print("model         tokens      limit   cublas  fastest     rule  invariant   expected")
    steps = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for tokens in buckets:
            chosen = [row for row in rows if row["model"] == model and row["tokens"] == tokens]
            totals = {
                column: sum(row["count"] * (row[f"{column}_us"] or 0) for row in chosen) / 1e3
                for column in ("expected", "cublas", "fastest", "rule", "invariant")
            }
            expected = EXPECTED_STEPS.get((model, tokens))
            cells = " ".join(f"{total:8.3f}" for total in totals.values())
            print(f"{model:13} {tokens:6}   {cells}     {' / '.join(f'{time:.2f}' for time in expected or ()) or '-'}")
            steps.append({"model": model, "tokens": tokens, **totals, "expected_before": expected})
    return steps


def write_results(folder: pathlib.Path, rows: list[dict[str, Any]], steps: list[dict[str, Any]], write: bool) -> None:
    device = torch.cuda.get_device_name()
    folder.mkdir(parents=True, exist_ok=True)
    about = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    (folder / "gemm.json").write_text(json.dumps({**about, "steps": steps, "products": rows}, indent=1))
    choices: dict[str, dict[str, list[str | int]]] = {}
    for row in rows:
        choices.setdefault(row["shape"], {})[str(row["tokens"])] = row["fastest"]
    table = json.loads(SHIPPED.read_text())
    table.setdefault(device, {}).update(choices)
    text = format_table(table)
    (folder / SHIPPED.name).write_text(text)
    if write:
        SHIPPED.write_text(text)


def format_table(table: dict[str, dict[str, dict[str, list[str | int]]]]) -> str:
    """The table of choices as JSON, a line for each shape."""
    devices = []
    for device, shapes in sorted(table.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(choices)}" for key, choices in shapes.items())
        devices.append(f" {json.dumps(device)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(devices) + "\n}\n" if devices else "{}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder of the results")
    parser.add_argument("--models", nargs="+", choices=[m.name for m in MODELS], default=[m.name for m in MODELS])
    parser.add_argument("--tokens", nargs="+", type=int, choices=BUCKETS, default=list(BUCKETS))
    parser.add_argument("--threads", type=int, default=12, help="threads that compile kernels")
    parser.add_argument("--write-choices", action="store_true", help="write the table that the worker reads")
    options = parser.parse_args()
    models = [model for model in MODELS if model.name in options.models]
    timer = GemmTimer(torch.device("cuda", torch.cuda.current_device()))
    compile_all(timer, models, options.tokens, options.threads)
    start = time.perf_counter()
    rows = [row for model in models for row in measure_model(timer, model, options.tokens)]
    steps = print_steps(rows, options.tokens)
    write_results(options.out, rows, steps, options.write_choices)
    print(f"measured in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
