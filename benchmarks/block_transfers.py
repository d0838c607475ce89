"""KV blocks to host memory and back: how much of the bus they use, and what decoding beside them loses.

    PYTHONPATH=. python benchmarks/block_transfers.py --out transfers.json

``memcpy`` is a copy of one large piece of page-locked memory; ``kernel/N`` the worker's kernel with N programs, for
blocks that lie anywhere; ``staged`` the same in torch: a gather on the GPU, then a copy for each run of neighbours on
the host. Then decode steps of a model with random weights, two ahead of their results as a worker runs them: alone, and
with so many transfers beside them that the bus is never idle.

On a GPU the command ends with status 1 if the worker's own setting reaches less than 80 % of memcpy in either
direction, or if steps take more than 10 % longer beside it. On a CPU the worker's plain copies are measured instead.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_worker.build import build_runner
from gpu_worker.cuda_transfers import CudaTransfers
from gpu_worker.host_pool import TO_DEVICE, TO_HOST
from gpu_worker.kernels.block_transfer import PROGRAMS
from gpu_worker.loading.open_weights import open_weights
from headrace.bench.offline import SHAPES
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
WARM_UP = 8
DIRECTIONS = {"to host": (TO_HOST,), "to device": (TO_DEVICE,), "both": (TO_HOST, TO_DEVICE)}
LEAST_SHARE, LARGEST_LOSS = 0.8, 0.1
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Bench:
    """A runner whose slots hold requests with made-up contexts, and blocks that are nobody's.

    Args:
        steps: of decoding, at most.
        moved: blocks for each direction.
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
        self.pairs = {d: np.stack([self.first_free + d * moved + order, d * moved + order[::-1]], 1) for d in (0, 1)}

    @property
    def block_bytes(self) -> int:
        return int(self.cache.block_bytes)

    def transfers(self, direction: int, count: int, first: int = 0) -> np.ndarray:
        """[count, 3] as of ``Step``."""
        pairs = np.take(self.pairs[direction], np.arange(first, first + count), axis=0, mode="wrap")
        return np.insert(pairs, 0, direction, axis=1).astype(np.int32)

    # -- rates -------------------------------------------------------------------------------------------------------

    def rate(self, seconds_of: Callable[[np.ndarray], float], direction: int, count: int) -> float:
        """GB/s of ``count`` blocks, the best of a few times."""
        transfers = self.transfers(direction, count)
        return count * self.block_bytes / min(seconds_of(transfers) for _ in range(5)) / 1e9

    def use(self, transfers: CudaTransfers | None) -> None:
        """How blocks are copied; None: as the worker does on a CPU."""
        if transfers is not None:
            self.runner.reset()
            self.runner.transfers = transfers

    def seconds_of(self) -> Callable[[np.ndarray], float]:
        if self.on_gpu:
            return self.runner.transfers.seconds_of  # type: ignore[no-any-return]
        return lambda transfers: self.pool.seconds_of_copy(self.cache, transfers)  # type: ignore[no-any-return]

    def memcpy(self, direction: int) -> float:
        """GB/s of one large piece."""
        host = self.pool.tensor[: self.moved].view(torch.uint8).view(-1)
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

    def decode(self, steps: int, directions: tuple[int, ...], ahead: int) -> tuple[float, float]:
        """Milliseconds of a step, and GB/s of the transfers beside them.

        Args:
            ahead: blocks of a direction that are on the way at a time, at least.
        """
        self.fill()
        window: collections.deque[Any] = collections.deque()
        launched: collections.deque[tuple[int, int]] = collections.deque()
        on_the_way = done = first = 0
        entries = [(row, row) for row in range(self.rows)]
        number, began = 1000, 0.0
        for index in range(steps + WARM_UP):
            if index == WARM_UP:
                began, done = time.perf_counter(), 0
            number, count = number + 1, max(0, ahead - on_the_way) if directions else 0
            transfers = [self.transfers(direction, count, first) for direction in directions]
            first, on_the_way = first + count, on_the_way + count
            launched.append((number, count))
            parts = np.concatenate(transfers) if transfers else []
            step = self.step(number, decode=range(self.rows), sample=entries, transfers=parts)
            window.append(self.runner.launch(step))
            if len(window) > 2:
                output = window.popleft().wait()
                while launched and launched[0][0] <= output.transferred:
                    blocks = launched.popleft()[1]
                    on_the_way, done = on_the_way - blocks, done + blocks
        while window:
            window.popleft().wait()
        seconds = time.perf_counter() - began
        return 1000 * seconds / steps, done * len(directions) * self.block_bytes / seconds / 1e9


class Staged(CudaTransfers):
    """The same by torch, which has no copy of scattered blocks: by way of one piece of the device's memory."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.cache, bench.pool)
        self._blocks, self._host = bench.cache.tensor.transpose(0, 1), bench.pool.tensor
        self._runs: list[tuple[slice, slice]] = []

    def _launch(self, direction: int, pairs: np.ndarray) -> torch.cuda.Event | None:
        pairs = pairs[np.argsort(pairs[:, 1])]
        hosts = pairs[:, 1]
        edges = [0, *(np.flatnonzero(np.diff(hosts) != 1) + 1).tolist(), len(hosts)]
        self._runs = [
            (slice(first, last), slice(int(hosts[first]), int(hosts[first]) + last - first))
            for first, last in itertools.pairwise(edges)
        ]
        return super()._launch(direction, pairs)

    def copy(self, pairs: torch.Tensor, direction: int) -> None:
        blocks = pairs[:, 0].long()
        if direction == TO_HOST:
            pieces = self._blocks.index_select(0, blocks)
            for here, there in self._runs:
                self._host[there].copy_(pieces[here], non_blocking=True)
        else:
            pieces = torch.empty((len(pairs), *self._host.shape[1:]), dtype=self._host.dtype, device=pairs.device)
            for here, there in self._runs:
                pieces[here].copy_(self._host[there], non_blocking=True)
            self._blocks.index_copy_(0, blocks, pieces)


def methods(bench: Bench, programs: list[int]) -> dict[str, Any]:
    """What copies, by name. The first is the worker's own setting."""
    if not bench.on_gpu:
        return {"copy": None}
    known = {f"kernel/{n}": CudaTransfers(bench.cache, bench.pool, n) for n in dict.fromkeys([PROGRAMS, *programs])}
    return {**known, "staged": Staged(bench)}


def measure_rates(bench: Bench, ways: dict[str, Any], counts: list[int]) -> list[dict[str, Any]]:
    results = []
    for name in ("to host", "to device"):
        (direction,) = DIRECTIONS[name]
        memcpy = bench.memcpy(direction)
        print(f"{name:10} memcpy                {memcpy:8.2f} GB/s", flush=True)
        for way, transfers in ways.items():
            bench.use(transfers)
            for count in (count for count in counts if count <= bench.moved):
                rate = bench.rate(bench.seconds_of(), direction, count)
                share = rate / memcpy
                results.append({"direction": name, "way": way, "blocks": count, "gb_per_s": rate, "share": share})
                print(f"{name:10} {way:12} {count:5} blocks {rate:8.2f} GB/s {share:7.1%}", flush=True)
    return results


def measure_decoding(bench: Bench, ways: dict[str, Any], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Each case between two runs without transfers, several times."""
    results = []
    for way, transfers in ways.items():
        bench.use(transfers)
        for name, directions in DIRECTIONS.items():
            alone, beside, rates = [], [], []
            for _ in range(rounds):
                alone.append(bench.decode(steps, (), 0)[0])
                period, rate = bench.decode(steps, directions, bench.moved // 2)
                beside.append(period)
                rates.append(rate)
            alone.append(bench.decode(steps, (), 0)[0])
            before, after, rate = (statistics.median(values) for values in (alone, beside, rates))
            loss = after / before - 1
            results.append(
                {"direction": name, "way": way, "alone_ms": before, "beside_ms": after, "loss": loss, "gb_per_s": rate}
            )
            print(
                f"{name:10} {way:12} steps {before:8.3f} ms, beside transfers {after:8.3f} ms ({loss:+.1%}), which run "
                f"at {rate:6.2f} GB/s",
                flush=True,
            )
    return results


def shortcomings(rates: list[dict[str, Any]], decoding: list[dict[str, Any]], way: str) -> list[str]:
    """What the worker's own setting does not reach, in words."""
    found = []
    for direction in ("to host", "to device"):
        shares = [each["share"] for each in rates if (each["direction"], each["way"]) == (direction, way)]
        if max(shares) < LEAST_SHARE:
            found.append(f"{direction}: {max(shares):.0%} of memcpy, not {LEAST_SHARE:.0%}")
    found += [
        f"{each['direction']}: steps take {each['loss']:.0%} longer, not {LARGEST_LOSS:.0%} at most"
        for each in decoding
        if each["way"] == way and each["loss"] > LARGEST_LOSS
    ]
    return found


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b" if on_gpu else "smollm2-135m")
    parser.add_argument("--rows", type=int, default=32 if on_gpu else 2, help="requests that decode")
    parser.add_argument("--context", type=int, default=1000 if on_gpu else 64, help="tokens of each")
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 4)
    parser.add_argument("--rounds", type=int, default=3 if on_gpu else 1)
    parser.add_argument("--moved", type=int, default=256 if on_gpu else 8, help="blocks of each direction")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 64, 256] if on_gpu else [1, 8])
    parser.add_argument("--programs", type=int, nargs="*", default=[2, 4, 16, 32])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    bench = Bench(device, args.shape, args.rows, args.context, args.steps, args.moved)
    ways = methods(bench, args.programs)
    print(f"{device}: {args.shape}, blocks of {bench.block_bytes / 2**20:.2f} MiB", flush=True)
    rates = measure_rates(bench, ways, args.counts)
    decoding = measure_decoding(bench, ways, args.steps, args.rounds)
    missed = shortcomings(rates, decoding, next(iter(ways)))
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
