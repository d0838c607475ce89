"""What a whole step costs on a GPU, in this process: the device's time, the host's time to launch it, and each kernel.

    python benchmarks/gpu_steps.py --models qwen3-0.6b llama-3.1-8b --profile --out steps.json

Random weights of real shapes. A case is ROWSxCONTEXT decode rows, with +TOKENS prefill tokens of one prompt beside
them, which @START tokens of the prompt come before.
``device`` is a step's time when its graph is replayed again and again; ``period`` the time between the ends of steps
that the runner launches as a worker does, two ahead of the results; ``host`` what ``launch`` takes.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_worker.build import build_runner
from gpu_worker.loading.open_weights import open_weights
from headrace.bench.offline import SHAPES
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
CASES = {
    "qwen3-0.6b": ("1x256", "8x256", "32x256", "256x600", "256x600+512"),
    "llama-3.1-8b": ("1x256", "8x256", "32x256", "256x600", "256x600+512", "1000x350"),
}


class Bench:
    """A runner whose slots hold requests with made-up contexts."""

    def __init__(self, shape: str, temperature: float) -> None:
        path = SHAPES / f"{shape}.json"
        source = local_source(path, str(path))
        config = load_model_config(source)
        worker = WorkerConfig(
            model=str(path), dtype="bfloat16", max_model_len=8192, block_size=BLOCK_SIZE, num_slots=1032,
            max_num_batched_tokens=8192, gpu_memory_utilization=0.9, kv_cache_bytes=None, num_blocks_override=None,
            seed=0, batch_invariant=False, enforce_eager=False, load_format="dummy",
        )  # fmt: skip
        self.runner: Any = build_runner(worker, config, open_weights(source, config, "dummy", 0), "cuda")
        self.vocab = config.vocab_size
        self.params = SamplingParams(temperature=temperature, seed=1, max_tokens=None)
        self.number, self.next_block = 0, 1
        self.last_key: Any = None
        run = self.runner._graphs.run

        def noted(key: Any, launch: Any) -> None:
            self.last_key = key
            run(key, launch)

        self.runner._graphs.run = noted

    def step(self, **parts: Any) -> Step:
        self.number += 1
        shapes = {name: (0, columns) if columns else 0 for name, columns in Step.ARRAYS.items()}
        arrays = {name: np.empty(shape, np.int32) for name, shape in shapes.items()}
        given = {name: np.asarray(value, np.int32) for name, value in parts.items() if name != "new"}
        return Step(epoch=Epoch(0, 0), number=self.number, new=parts.get("new", []), **{**arrays, **given})

    def fill(self, rows: int, context: int, room: int) -> None:
        """The first slots get a request each, of which all but the last token counts as computed."""
        self.runner.reset()
        self.next_block = 1
        blocks = -(-(context + room) // BLOCK_SIZE)
        for first in range(0, rows, 32):
            slots = range(first, min(rows, first + 32))
            self.runner.launch(
                self.step(
                    new=[self.request(slot, context, context - 1) for slot in slots],
                    new_tokens=np.random.default_rng(first).integers(5, self.vocab - 5, len(slots) * context),
                    prefill=[(slot, context - 1, 1) for slot in slots],
                    sample=[(row, slot) for row, slot in enumerate(slots)],
                    blocks=[(slot, self.block()) for slot in slots for _ in range(blocks)],
                )
            ).wait()

    def block(self) -> int:
        self.next_block += 1
        return 1 + self.next_block % (self.runner.cache.num_blocks - 1)

    def request(self, slot: int, length: int, start: int) -> SlotInit:
        return SlotInit(slot, f"r{slot}", 0, length, length, start, 8191, self.params, [])

    def measure(self, case: str, steps: int, profiled: bool) -> dict[str, Any]:
        shape, _, tokens = case.partition("+")
        rows, context = (int(number) for number in shape.split("x"))
        prefill, start = (int(number or 0) for number in tokens.partition("@")[::2])
        length = start + prefill
        self.fill(rows, context, 4 * steps + 40)
        self.last_key = None
        slot = rows
        entries = [(row, row) for row in range(rows)]

        def launch() -> Any:
            if not prefill:
                return self.runner.launch(self.step(decode=range(rows), sample=entries))
            blocks = [(slot, self.block()) for _ in range(-(-length // BLOCK_SIZE) + 1)]
            step = self.step(
                new=[self.request(slot, length, start)], new_tokens=np.full(length, 7),
                prefill=[(slot, start, prefill)],
                decode=range(rows), sample=[(0, slot), *((row + 1, row) for row in range(rows))], blocks=blocks,
                released=[slot] if self.runner.state.active[slot] else [],
            )  # fmt: skip
            return self.runner.launch(step)

        for _ in range(4):
            launch().wait()
        result = {"case": case, **self.pipelined(launch, steps)}
        if (graph := self.runner._graphs._graphs.get(self.last_key)) is not None:
            result["device_ms"] = replayed(graph, steps)
        if profiled:
            result["kernels"] = kernels(launch)
        return result

    def pipelined(self, launch: Any, steps: int) -> dict[str, float]:
        """Two steps in flight, as the engine keeps them."""
        window: collections.deque[Any] = collections.deque()
        host = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            window.append(launch())
            host.append(time.perf_counter() - before)
            if len(window) > 2:
                window.popleft().wait()
        while window:
            window.popleft().wait()
        period = (time.perf_counter() - began) / steps
        return {"period_ms": 1000 * period, "host_ms": 1000 * sorted(host)[len(host) // 2]}


def replayed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Milliseconds of a replay, one after another."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def kernels(launch: Any) -> dict[str, tuple[float, float]]:
    """Launches of a step, and microseconds of a step, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(4):
            launch().wait()
    events = sorted(result.key_averages(), key=lambda event: -event.self_device_time_total)
    table = {event.key[:60]: (event.count / 4, event.self_device_time_total / 4) for event in events}
    return dict(list(table.items())[:24])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for model in args.models:
        bench = Bench(model, args.temperature)
        for case in args.cases or CASES[model]:
            result = bench.measure(case, args.steps, args.profile)
            results.setdefault(model, []).append(result)
            times = "  ".join(f"{name} {value:.3f}" for name, value in result.items() if name.endswith("_ms"))
            print(f"{model:14} {case:14} {times}", flush=True)
            for name, (count, micros) in result.get("kernels", {}).items():
                print(f"      {count:6.1f} x {micros:9.1f} us  {name}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
