"""The model runner alone, in this process: decode at several batch sizes and a prefill, against its own bare products.

    python benchmarks/worker_micro.py --model demo --dtype bfloat16 --threads 2 --profile 16

``products`` is the time that the step's matrix products take by themselves, one after another: what a step could take
at best with this library. Both are the fastest of the repetitions, so that other processes disturb them less.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np

from gpu_worker.environment import prepare_environment
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import resolve_model
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
MAX_LEN = 2048
EPOCH = Epoch(1, 1)


def make_step(**parts: object) -> Step:
    arrays = {
        name: np.array(parts.get(name, []), np.int32).reshape((-1, columns) if columns else -1)
        for name, columns in Step.ARRAYS.items()
    }
    return Step(EPOCH, 1, parts.get("new", []), **arrays)  # type: ignore[arg-type]


def fastest(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of so many runs."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


class Bench:
    """A runner and the steps that are timed on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        source = resolve_model(options.model)
        self.config = load_model_config(source)
        from gpu_worker.loading.open_weights import open_weights

        weights = open_weights(source, self.config, "auto", 0)
        import torch

        from gpu_worker.build import build_runner

        torch.set_num_threads(1)
        worker = worker_config(str(source.path), options.dtype, options.batch_invariant)
        self.runner = build_runner(worker, self.config, weights, "cpu")
        torch.set_num_threads(options.threads)
        self.params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=None)
        self.steps = options.steps

    def prefill(self, rows: int, length: int) -> None:
        """New requests in the first slots, computed and sampled once; the earlier ones leave."""
        blocks = -(-(length + self.steps + 1) // BLOCK_SIZE)
        slots = range(rows)
        new = [SlotInit(s, f"r{s}", 0, length, length, 0, MAX_LEN, self.params, [2]) for s in slots]
        step = make_step(
            released=np.flatnonzero(self.runner.state.active),
            new=new,
            new_tokens=np.arange(rows * length) * 7919 % (self.config.vocab_size - 10) + 5,
            prefill=[(s, 0, length) for s in slots],
            sample=[(s, s) for s in slots],
            blocks=[(s, 1 + s * blocks + b) for s in slots for b in range(blocks)],
        )
        self.runner.launch(step).wait()

    def decode(self, rows: int) -> None:
        """One token for each of the first slots."""
        self.runner.launch(make_step(decode=range(rows), sample=[(s, s) for s in range(rows)])).wait()

    def products(self, rows: int, sampled: int) -> float:
        """Seconds of a step's matrix products alone."""
        import torch

        model, config, dtype = self.runner.model, self.config, self.runner.cache.tensor.dtype
        narrow = torch.randn(rows, config.hidden_size).to(dtype)
        wide = torch.randn(rows, config.intermediate_size).to(dtype)
        heads = torch.randn(rows, config.num_heads * config.head_dim).to(dtype)

        def run() -> None:
            for layer in model.layers:  # type: ignore[attr-defined]
                layer.attention.qkv(narrow)
                layer.attention.output(heads)
                layer.mlp.gated.gate_up(narrow)
                layer.mlp.down(wide)
            model.logits(narrow[:sampled])

        with torch.inference_mode():
            return fastest(run, 8)

    def profile(self, rows: int) -> None:
        """Where the time of decode steps goes, by operation."""
        from torch.profiler import profile

        self.prefill(rows, 45)
        self.decode(rows)
        with profile() as result:
            for _ in range(10):
                self.decode(rows)
        print(result.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))


def main() -> None:
    options = arguments()
    prepare_environment()
    bench = Bench(options)
    print(f"{'':14}{'rows':>5}{'tokens':>8}{'ms':>9}{'tok/s':>9}{'products ms':>13}{'share':>7}")
    for rows in options.rows:
        bench.prefill(rows, options.prompt)
        seconds = fastest(functools.partial(bench.decode, rows), options.steps)
        report("decode", rows, rows, seconds, bench.products(rows, rows))
    seconds = fastest(functools.partial(bench.prefill, 1, options.prefill), 5)
    report("prefill", 1, options.prefill, seconds, bench.products(options.prefill, 1))
    if options.profile:
        bench.profile(options.profile)


def worker_config(model: str, dtype: str, batch_invariant: bool) -> WorkerConfig:
    return WorkerConfig(
        model=model,
        dtype=dtype,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        num_slots=65,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.9,
        kv_cache_bytes=None,
        num_blocks_override=None,
        seed=0,
        batch_invariant=batch_invariant,
        enforce_eager=False,
    )


def report(name: str, rows: int, tokens: int, seconds: float, products: float) -> None:
    print(
        f"{name:14}{rows:5}{tokens:8}{seconds * 1e3:9.1f}{tokens / seconds:9.0f}{products * 1e3:13.1f}"
        f"{products / seconds:7.0%}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=45)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="also profile decode steps of so many rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
