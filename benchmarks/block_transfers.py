"""KV blocks to host memory and back: how much of the bus they use, and what decoding beside them loses.

    PYTHONPATH=. python benchmarks/block_transfers.py --out transfers.json

``memcpy`` is a copy of one large piece of page-locked memory. The worker's transfers are timed as the engine sees them,
from the call to the end, for blocks that lie anywhere on the device and, on the host, anywhere (``scattered``) or side
by side (``neighbours``). Then decode steps of a model with random weights, two ahead of their results as a worker runs
them: alone, and with so many transfers of scattered blocks beside them that the bus is never idle.

On a GPU the command ends with status 1 if transfers reach less than 80 % of memcpy in either direction, or if steps
take more than 10 % longer beside them. On a CPU the worker's plain copies are measured instead.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_worker.build import build_runner
from gpu_worker.host_pool import TO_DEVICE, TO_HOST
from gpu_worker.loading.open_weights import open_weights
from headrace.bench.offline import SHAPES
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
WARM_UP = 8
OF_A_STEP = 4
"""A step transfers this part of the blocks at most: those of several steps are on the way at a time."""
DIRECTIONS = {"to host": (TO_HOST,), "to device": (TO_DEVICE,), "both": (TO_HOST, TO_DEVICE)}
LEAST_SHARE, LARGEST_LOSS = 0.8, 0.1
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Bench:
    """A runner whose slots hold requests with made-up contexts, and blocks that are nobody's.

    Args:
        steps: of decoding, at most.
        moved: blocks for each direction, all on the way while steps decode: more than the bus carries in three of them.
    """

    def __init__(self, device: str, shape: str, rows: int, context: int, steps: int, moved: int) -> None:
        path = SHAPES / f"{shape}.json"
        source = local_source(path, str(path))
        config = load_model_config(source)
        self.rows, self.context, self.moved = rows, context, moved
        self.length = context + steps + WARM_UP + 8
        self.room = -(-self.length // BLOCK_SIZE)
        self.first_free = 1 + rows * self.room
        itemsize = 2 if device == "cuda" else 4
        block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_SIZE * itemsize
        worker = WorkerConfig(
            model=str(path), dtype="bfloat16" if device == "cuda" else "float32", max_model_len=self.length,
            block_size=BLOCK_SIZE, num_slots=rows + 8, max_num_batched_tokens=2048, gpu_memory_utilization=0.9,
            kv_cache_bytes=None, num_blocks_override=self.first_free + 2 * moved, seed=0, batch_invariant=False,
            enforce_eager=False, load_format="dummy", host_bytes=2 * moved * block_bytes,
        )  # fmt: skip
        self.runner: Any = build_runner(worker, config, open_weights(source, config, "dummy", 0), device)
        self.on_gpu = self.runner.device.type == "cuda"
        self.cache, self.pool = self.runner.cache, self.runner.host_pool
        assert self.pool.num_blocks == 2 * moved
        # Blocks of each direction lie anywhere among their own.
        order = np.random.default_rng(0).permutation(moved)
        self.hosts = {"scattered": order[::-1], "neighbours": np.arange(moved)}
        self.blocks = self.first_free + order

    @property
    def block_bytes(self) -> int:
        return int(self.cache.block_bytes)

    def transfers(self, direction: int, count: int, first: int = 0, place: str = "scattered") -> np.ndarray:
        """[count, 3] as of ``Step``."""
        which, own = np.arange(first, first + count) % self.moved, direction * self.moved
        columns = [np.full(count, direction), self.blocks[which] + own, self.hosts[place][which] + own]
        return np.stack(columns, 1).astype(np.int32)

    # -- rates -------------------------------------------------------------------------------------------------------

    def rate(self, direction: int, count: int, place: str) -> float:
        """GB/s of ``count`` blocks, the best of a few times."""
        transfers = self.transfers(direction, count, 0, place)
        return count * self.block_bytes / min(self.seconds_of(transfers) for _ in range(5)) / 1e9

    def seconds_of(self, transfers: np.ndarray) -> float:
        if self.on_gpu:
            return float(self.runner.transfers.seconds_of(transfers))
        return float(self.pool.seconds_of_copy(self.cache, transfers))

    def memcpy(self, direction: int) -> float:
        """GB/s of one large piece."""
        host = self.pool.tensor[: min(self.moved, 256)].view(torch.uint8).view(-1)
        there = torch.empty_like(host, device=self.runner.device)
        source, target = (there, host) if direction == TO_HOST else (host, there)
        seconds = []
        for _ in range(5):
            began = self.mark()
            target.copy_(source, non_blocking=True)
            seconds.append(self.seconds_since(began))
        return host.numel() / min(seconds) / 1e9

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_since(self, began: Any) -> float:
        end = self.mark()
        if not self.on_gpu:
            return float(end - began)
        end.synchronize()
        return float(began.elapsed_time(end)) / 1000

    # -- decoding ----------------------------------------------------------------------------------------------------

    def step(self, number: int, **parts: Any) -> Step:
        arrays = {
            name: np.asarray(parts.get(name, []), np.int32).reshape((-1, columns) if columns else -1)
            for name, columns in Step.ARRAYS.items()
        }
        return Step(epoch=Epoch(0, 0), number=number, new=parts.get("new", []), **arrays)

    def fill(self) -> None:
        """Each slot gets a request, of which all but the last token counts as computed."""
        self.runner.reset()
        length = self.context
        for first in range(0, self.rows, 32):
            slots = range(first, min(self.rows, first + 32))
            step = self.step(
                first,
                new=[SlotInit(s, f"r{s}", 0, length, length, length - 1, self.length, PARAMS, []) for s in slots],
                new_tokens=np.full(len(slots) * length, 7),
                prefill=[(slot, length - 1, 1) for slot in slots],
                sample=list(enumerate(slots)),
                blocks=[(slot, 1 + slot * self.room + index) for slot in slots for index in range(self.room)],
            )
            self.runner.launch(step).wait()

    def decode(self, steps: int, directions: tuple[int, ...]) -> Decoded:
        """Run decode steps, and transfers in some directions beside them."""
        self.fill()
        window: collections.deque[Any] = collections.deque()
        launched: collections.deque[tuple[int, int]] = collections.deque()
        on_the_way = done = first = 0
        entries = [(row, row) for row in range(self.rows)]
        number, began, launch_s = 1000, 0.0, 0.0
        for index in range(steps + WARM_UP):
            if index == WARM_UP:
                began, done, launch_s = time.perf_counter(), 0, 0.0
            number, count = number + 1, min(self.moved - on_the_way, self.moved // OF_A_STEP) if directions else 0
            transfers = [self.transfers(direction, count, first) for direction in directions]
            first, on_the_way = first + count, on_the_way + count
            launched.append((number, count))
            parts = np.concatenate(transfers) if transfers else []
            step = self.step(number, decode=range(self.rows), sample=entries, transfers=parts)
            launching = time.perf_counter()
            window.append(self.runner.launch(step))
            launch_s += time.perf_counter() - launching
            if len(window) > 2:
                output = window.popleft().wait()
                while launched and launched[0][0] <= output.transferred:
                    blocks = launched.popleft()[1]
                    on_the_way, done = on_the_way - blocks, done + blocks
        while window:
            window.popleft().wait()
        seconds = time.perf_counter() - began
        gb_per_s = done * len(directions) * self.block_bytes / seconds / 1e9
        return Decoded(1000 * seconds / steps, 1000 * launch_s / steps, gb_per_s)


class Decoded(NamedTuple):
    """Means of decode steps."""

    step_ms: float
    launch_ms: float
    """Of the host."""
    gb_per_s: float
    """Of the transfers beside them, both directions together."""


def measure_rates(bench: Bench, counts: list[int]) -> list[dict[str, Any]]:
    results = []
    for name in ("to host", "to device"):
        (direction,) = DIRECTIONS[name]
        memcpy = bench.memcpy(direction)
        print(f"{name:10} memcpy                  {memcpy:8.2f} GB/s", flush=True)
        for place in bench.hosts:
            for count in (count for count in counts if count <= bench.moved):
                rate = bench.rate(direction, count, place)
                share = rate / memcpy
                results.append({"direction": name, "hosts": place, "blocks": count, "gb_per_s": rate, "share": share})
                print(f"{name:10} {place:10} {count:5} blocks {rate:8.2f} GB/s {share:7.1%}", flush=True)
    return results


def measure_decoding(bench: Bench, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Each case between two runs without transfers, several times."""
    alone = [bench.decode(steps, ())]
    beside: dict[str, list[Decoded]] = {name: [] for name in DIRECTIONS}
    for _ in range(rounds):
        for name, directions in DIRECTIONS.items():
            beside[name].append(bench.decode(steps, directions))
            alone.append(bench.decode(steps, ()))
    results = []
    before = medians(alone)
    for name, runs in beside.items():
        after = medians(runs)
        loss = after.step_ms / before.step_ms - 1
        results.append(
            {"direction": name, "loss": loss, "gb_per_s": after.gb_per_s,
             "alone_ms": before.step_ms, "beside_ms": after.step_ms,
             "launch_alone_ms": before.launch_ms, "launch_beside_ms": after.launch_ms}
        )  # fmt: skip
        print(
            f"{name:10} steps {before.step_ms:8.3f} ms, beside transfers {after.step_ms:8.3f} ms ({loss:+.1%}), which "
            f"run at {after.gb_per_s:6.2f} GB/s; launched in {before.launch_ms:.3f} and {after.launch_ms:.3f} ms",
            flush=True,
        )
    return results


def medians(runs: list[Decoded]) -> Decoded:
    return Decoded(*(statistics.median(values) for values in zip(*runs, strict=True)))


def shortcomings(rates: list[dict[str, Any]], decoding: list[dict[str, Any]]) -> list[str]:
    """What is not reached, in words."""
    found = []
    for direction in ("to host", "to device"):
        share = max(each["share"] for each in rates if each["direction"] == direction)
        if share < LEAST_SHARE:
            found.append(f"{direction}: {share:.0%} of memcpy, not {LEAST_SHARE:.0%}")
    found += [
        f"{each['direction']}: steps take {each['loss']:.0%} longer, not {LARGEST_LOSS:.0%} at most"
        for each in decoding
        if each["loss"] > LARGEST_LOSS
    ]
    return found


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b" if on_gpu else "smollm2-135m")
    parser.add_argument("--rows", type=int, default=32 if on_gpu else 2, help="requests that decode")
    parser.add_argument("--context", type=int, default=1000 if on_gpu else 64, help="tokens of each")
    parser.add_argument("--steps", type=int, default=120 if on_gpu else 4)
    parser.add_argument("--rounds", type=int, default=2 if on_gpu else 1)
    parser.add_argument("--moved", type=int, default=768 if on_gpu else 8, help="blocks of each direction")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 64, 256] if on_gpu else [1, 8])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    bench = Bench(device, args.shape, args.rows, args.context, args.steps, args.moved)
    print(f"{device}: {args.shape}, blocks of {bench.block_bytes / 2**20:.2f} MiB", flush=True)
    rates = measure_rates(bench, args.counts)
    decoding = measure_decoding(bench, args.steps, args.rounds)
    missed = shortcomings(rates, decoding)
    for words in missed:
        print(words, flush=True)
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        name = torch.cuda.get_device_name() if on_gpu else device
        content = {"device": name, **settings, "block_bytes": bench.block_bytes, "rates": rates, "decoding": decoding}
        args.out.write_text(json.dumps({**content, "missed": missed}, indent=1) + "\n")
    return 1 if missed and on_gpu else 0


if __name__ == "__main__":
    sys.exit(main())
