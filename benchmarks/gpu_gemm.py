"""The matrix products of a decode step on a GPU: cuBLAS against the Triton kernels, for few tokens.

    PYTHONPATH=. python benchmarks/gpu_gemm.py --out "$OUT" --write-choices

Every product is timed in a CUDA graph whose weights take turns, more of them than the L2 cache holds, so that they come
from device memory as they do in a model, and kernels are launched as the model does (``programmatic_launch``). The time
of a gated product includes the activation, which is a kernel of its own after cuBLAS; only the column ``invariant`` is
without it. Every kernel's result is compared with the float32 product first; a wrong one is left out, and the command
ends with status 1.

The commonest numbers of tokens come first, all kernels for them compiled beforehand; after ``--seconds`` nothing more
is measured. ``<out>/gemm.json`` gets the times; ``<out>/gemm_choices.json`` the table of ``gpu_worker/layers`` with
what was measured put in, which ``--write-choices`` also writes back to where the worker reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gpu_worker.kernels.gemm import KernelError, compiled_together
from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig, encode_choice
from gpu_worker.layers.gemm_choice import BUCKETS, SHIPPED, GemmShape, invariant_config, rule
from gpu_worker.layers.gemm_tuning import GemmTimer, candidates, fastest
from gpu_worker.threads import usable_cores

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
"""Milliseconds of all products of a step that were measured before, without the activation: cuBLAS, and the fastest of
all kernels."""

TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Relative to the largest value; half a unit in the last place of a bfloat16 result is 2^-9."""

Table: TypeAlias = dict[str, dict[str, dict[str, list[str | int]]]]
"""Choices by device, shape and number of tokens."""
COLUMNS = ("expected", "cublas", "gemv", "split_k", "rule", "invariant")
ROUNDS = ((1, 8, 32, 64, 128), (2, 4, 16, 256))
"""Numbers of tokens whose kernels are compiled together, then measured in this order."""


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

        gate_up = GemmShape(2 * self.intermediate, self.hidden, torch.bfloat16, torch.bfloat16, gated=True)

        return [
            ("qkv", self.layers, shape((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden)),
            ("o", self.layers, shape(self.hidden, self.heads * self.head_dim)),
            ("gate_up", self.layers, gate_up),
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


def everything_tried(shape: GemmShape, tokens: int) -> list[tuple[GemmShape, GemmChoice]]:
    """The candidates, what the rule takes where nothing was measured, and the batch-invariant kernel, never gated."""
    choices = dict.fromkeys([*candidates(shape, tokens), rule(shape, tokens)])
    invariant = dataclasses.replace(shape, gated=False), invariant_config(shape)
    return list(dict.fromkeys([*((shape, choice) for choice in choices), invariant]))


def compile_all(timer: GemmTimer, models: list[Model], buckets: list[int], threads: int) -> float:
    """Compile all kernels for these numbers of tokens; returns the seconds that it took."""
    start = time.monotonic()
    with compiled_together(threads):
        for shape in dict.fromkeys(shape for model in models for _, _, shape in model.products()):
            for tokens in buckets:
                for tried, choice in everything_tried(shape, tokens):
                    timer.compile(tried, tokens, choice)
    took = time.monotonic() - start
    print(f"\nkernels for {', '.join(map(str, buckets))} tokens compiled in {took:.1f} s", flush=True)
    return took


@dataclass
class Measurement:
    """Measures until the time is up.

    Attributes:
        deadline: on the monotonic clock.
        wrong: the kernels that computed something else, in words.
    """

    timer: GemmTimer
    models: list[Model]
    deadline: float
    wrong: list[str] = dataclasses.field(default_factory=list)

    def rows(self, buckets: list[int], threads: int) -> Iterator[dict[str, Any]]:
        """A row of the results for each product and number of tokens, the commonest numbers first."""
        compiling = 0.0
        for numbers in ROUNDS:
            chosen = [tokens for tokens in numbers if tokens in buckets]
            if not chosen or time.monotonic() + compiling > self.deadline:
                continue
            compiling = compile_all(self.timer, self.models, chosen, threads)
            print("microseconds a product")
            print("model         product    tokens  expected   cublas     gemv  split_k     rule invariant  fastest")
            for tokens in chosen:
                for model in self.models:
                    for name, count, shape in model.products():
                        if time.monotonic() < self.deadline:
                            yield self._row(model, name, count, shape, tokens)

    def _row(self, model: Model, name: str, count: int, shape: GemmShape, tokens: int) -> dict[str, Any]:
        measured = self._times(shape, tokens)
        times = {choice: time for (tried, choice), time in measured.items() if tried == shape}
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
            "invariant_us": measured.get((dataclasses.replace(shape, gated=False), invariant_config(shape))),
            "fastest_us": times[chosen],
            "fastest": encode_choice(chosen),
            "all": [[*encode_choice(choice), time] for choice, time in sorted(times.items(), key=lambda t: t[1])],
        }
        figures = (row[f"{column}_us"] for column in COLUMNS)
        cells = " ".join(f"{figure:8.2f}" if figure is not None else f"{'-':>8}" for figure in figures)
        print(
            f"{model.name:13} {name:10} {tokens:6}  {cells}   {' '.join(map(str, encode_choice(chosen)))}", flush=True
        )
        return row

    def _times(self, shape: GemmShape, tokens: int) -> dict[tuple[GemmShape, GemmChoice], float]:
        """Microseconds of everything that is tried and computes the product."""
        times = {}
        for tried, choice in everything_tried(shape, tokens):
            about = f"{tried.key}, {tokens} tokens, {choice}"
            try:
                error = self.timer.error(tried, tokens, choice)
                if choice is not None and not error <= TOLERANCE[shape.out_dtype]:
                    self.wrong.append(f"{about}: relative error {error:.2e}")
                    print(f"WRONG: {self.wrong[-1]}", flush=True)
                    continue
                times[tried, choice] = self.timer.microseconds(tried, tokens, choice)
            except KernelError as problem:
                print(f"left out: {about}: {problem}", flush=True)
        return times


def least(times: dict[GemmChoice, float], kind: type[GemvConfig] | type[SplitKConfig]) -> float | None:
    return min((time for choice, time in times.items() if isinstance(choice, kind)), default=None)


def print_steps(models: list[Model], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return the milliseconds of all products of a step, where all were measured."""
    print("\nmilliseconds of all products of a step (expected: cuBLAS / fastest)")
    print("model         tokens      limit   cublas  fastest     rule  invariant   expected")
    steps = []
    for model in models:
        for tokens in BUCKETS:
            chosen = [row for row in rows if row["model"] == model.name and row["tokens"] == tokens]
            if len(chosen) < len(model.products()):
                continue
            totals = {
                column: sum(row["count"] * (row[f"{column}_us"] or 0) for row in chosen) / 1e3
                for column in ("expected", "cublas", "fastest", "rule", "invariant")
            }
            expected = EXPECTED_STEPS.get((model.name, tokens))
            cells = " ".join(f"{total:8.3f}" for total in totals.values())
            before = " / ".join(f"{time:.2f}" for time in expected or ()) or "-"
            print(f"{model.name:13} {tokens:6}   {cells}     {before}")
            steps.append({"model": model.name, "tokens": tokens, **totals, "expected_before": expected})
    return steps


def write_results(folder: pathlib.Path, rows: list[dict[str, Any]], steps: list[dict[str, Any]], write: bool) -> None:
    device = torch.cuda.get_device_name()
    folder.mkdir(parents=True, exist_ok=True)
    about = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    (folder / "gemm.json").write_text(json.dumps({**about, "steps": steps, "products": rows}, indent=1))
    text = format_table(with_measured(json.loads(SHIPPED.read_text()), device, rows))
    (folder / SHIPPED.name).write_text(text)
    if write:
        SHIPPED.write_text(text)


def with_measured(table: Table, device: str, rows: list[dict[str, Any]]) -> Table:
    """The table with the fastest of each row put in; what was not measured stays."""
    shapes = {key: dict(choices) for key, choices in table.get(device, {}).items()}
    for row in rows:
        shapes.setdefault(row["shape"], {})[str(row["tokens"])] = row["fastest"]
    ordered = {key: dict(sorted(choices.items(), key=lambda item: int(item[0]))) for key, choices in shapes.items()}
    return {**table, device: ordered}


def format_table(table: Table) -> str:
    """The table of choices as JSON, a line for each shape."""
    devices = []
    for device, shapes in sorted(table.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(choices)}" for key, choices in shapes.items())
        devices.append(f" {json.dumps(device)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(devices) + "\n}\n" if devices else "{}\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder of the results")
    parser.add_argument("--models", nargs="+", choices=[m.name for m in MODELS], default=[m.name for m in MODELS])
    parser.add_argument("--tokens", nargs="+", type=int, choices=BUCKETS, default=list(BUCKETS))
    parser.add_argument("--seconds", type=float, default=100.0, help="time after which to stop (default: 100)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads that compile kernels")
    parser.add_argument("--write-choices", action="store_true", help="write the table that the worker reads")
    options = parser.parse_args(argv)
    start = time.monotonic()
    models = [model for model in MODELS if model.name in options.models]
    timer = GemmTimer(torch.device("cuda", torch.cuda.current_device()))
    measurement = Measurement(timer, models, start + options.seconds)
    rows = list(measurement.rows(options.tokens, options.threads))
    write_results(options.out, rows, print_steps(models, rows), options.write_choices)
    wanted = sum(len(model.products()) for model in models) * len(options.tokens)
    print(f"{len(rows)} of {wanted} measured in {time.monotonic() - start:.1f} s")
    return 1 if measurement.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
