"""Measures which kernel is fastest for a shape, with weights that come from device memory as they do in a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from gpu_worker.kernels.activation import silu_mul
from gpu_worker.kernels.gemm import KernelError, gemm
from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig
from gpu_worker.kernels.split_k import make_arrivals
from gpu_worker.layers.gemm_choice import (
    BUCKETS,
    MAX_GEMV_TOKENS,
    SHARED_BYTES,
    GemmShape,
    Measured,
    known_choices,
    store_cached,
    with_parts,
)
from shared.logging import get_logger

COLD_BYTES = 256 * 2**20
"""Weights that are used one after another, several times what the L2 cache holds (50 MB on an H100, 60 on an H200)."""
MAX_COPIES = 64
REPLAYS = 3
MARGIN = 0.98
"""A kernel of ours must take less than this share of the library's time."""

GEMV_CONFIGS = {
    1: ((1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (2, 1024, 2), (4, 512, 2), (8, 512, 2), (4, 256, 1), (8, 256, 1)),
    2: ((1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (4, 512, 2), (2, 512, 2), (4, 256, 1)),
    4: ((1, 1024, 4), (2, 1024, 4), (2, 512, 2), (2, 256, 1)),
}
SPLIT_K_TILES = {
    16: ((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 64, 4, 6), (64, 64, 4, 6)),
    32: ((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 64, 4, 6), (64, 64, 4, 6)),
    64: ((64, 128, 4, 4), (128, 64, 4, 5), (128, 128, 8, 3), (64, 64, 4, 5)),
    128: ((128, 64, 8, 4), (64, 64, 4, 4), (128, 128, 8, 3)),
}
"""(block_n, block_k, warps, stages) by block_m."""
MOST_SPLIT_K_TOKENS = 128


def candidates(shape: GemmShape, tokens: int) -> Iterator[GemmChoice]:
    """What may be fastest for so many tokens, the library first."""
    yield None
    if shape.dtype.itemsize != 2 or shape.in_features % 16:
        return
    if tokens <= MAX_GEMV_TOKENS:
        # A gated product has a row of the gate and one of up in each program at least.
        least_rows = 2 if shape.gated else 1
        for rows, block_k, warps in GEMV_CONFIGS[tokens]:
            if rows >= least_rows and block_k <= shape.in_features:
                yield GemvConfig(rows, block_k, warps)
    if 1 < tokens <= MOST_SPLIT_K_TOKENS:
        block_m = max(16, tokens)
        seen = set()
        for block_n, block_k, warps, stages in SPLIT_K_TILES[block_m]:
            tile = SplitKConfig(block_n, block_m, block_k, 1, warps, stages)
            if block_k > shape.in_features or tile.shared_bytes(shape.dtype.itemsize) > SHARED_BYTES:
                continue
            seen |= {tile, *(with_parts(shape, tokens, tile, waves) for waves in (1, 2))}
        yield from sorted(seen, key=repr)


class GemmTimer:
    """Times products on one device.

    Args:
        copies_bytes: device memory for the weights that take turns; one weight where that is larger.
    """

    def __init__(self, device: torch.device, copies_bytes: int = COLD_BYTES) -> None:
        self.device, self._copies_bytes = device, copies_bytes
        self._numbers = torch.empty(0, device=device)
        self._arrivals = make_arrivals(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # The memory of this graph keeps the pool alive while the graphs of single measurements come and go.
        self._keeper = self._capture(lambda: torch.zeros(1, device=device))

    def operands(self, shape: GemmShape, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Normally distributed activations [tokens, in], and as many weights [out, in] as exceed the caches."""
        copies = max(1, min(MAX_COPIES, self._copies_bytes // shape.nbytes))
        size = shape.out_features * shape.in_features
        if self._numbers.dtype != shape.dtype or len(self._numbers) < copies * size:
            self._numbers = torch.empty(0, device=self.device)
            length = max(copies * size, self._copies_bytes // shape.dtype.itemsize)
            self._numbers = torch.empty(length, dtype=shape.dtype, device=self.device).normal_(std=0.05)
        x = torch.randn(tokens, shape.in_features, device=self.device).to(shape.dtype)
        weights = self._numbers[: copies * size].view(copies, shape.out_features, shape.in_features)
        return x, list(weights)

    def compile(self, shape: GemmShape, tokens: int, choice: GemmChoice) -> None:
        """Compile the choice's kernel without launching it."""
        if choice is not None:
            x, weights = self.operands(shape, tokens)
            self._product(shape, choice, x, weights[0], compile_only=True)

    def error(self, shape: GemmShape, tokens: int, choice: GemmChoice) -> float:
        """The largest difference from the float32 product, relative to the largest value."""
        x, weights = self.operands(shape, tokens)
        expected = x.float() @ weights[0].float().T
        if shape.gated:
            expected = silu_mul(expected)
        result = self._product(shape, choice, x, weights[0])
        return float((result.float() - expected).abs().max() / expected.abs().max())

    def microseconds(self, shape: GemmShape, tokens: int, choice: GemmChoice) -> float:
        """Time of one product among many in a CUDA graph, whose weights take turns; the fastest of three replays."""
        x, weights = self.operands(shape, tokens)
        calls = weights * -(-4 // len(weights))

        def run() -> None:
            for weight in calls:
                self._product(shape, choice, x, weight)

        self._product(shape, choice, x, weights[0])
        graph = self._capture(run)
        graph.replay()
        return min(_replay_microseconds(graph) for _ in range(REPLAYS)) / len(calls)

    def _product(
        self, shape: GemmShape, choice: GemmChoice, x: torch.Tensor, weight: torch.Tensor, *, compile_only: bool = False
    ) -> torch.Tensor:
        return gemm(
            x,
            weight,
            None,
            choice,
            self._arrivals,
            out_dtype=shape.out_dtype,
            gated=shape.gated,
            compile_only=compile_only,
        )

    def times(self, shape: GemmShape, tokens: int) -> dict[GemmChoice, float]:
        """Microseconds of every candidate that this device can run."""
        times: dict[GemmChoice, float] = {}
        for choice in candidates(shape, tokens):
            try:
                times[choice] = self.microseconds(shape, tokens, choice)
            except KernelError as error:
                get_logger().warning("kernel of a matrix product is left out", choice=str(choice), error=str(error))
        return times

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache each time.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        return graph


def _replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def fastest(times: dict[GemmChoice, float]) -> GemmChoice:
    """The choice with the least time; the library where none is clearly faster."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < MARGIN * times[None] else None


def tune(shapes: Iterable[GemmShape], device: torch.device, *, seconds: float = 1.0) -> int:
    """Measure products that nothing is known about, and store the choices for the next start.

    For idle time: it compiles kernels, keeps the device busy and takes ``COLD_BYTES`` of its memory or one weight, and
    stops after the measurement during which the time is up. Layers that exist keep their choices.

    Returns:
        How many pairs of a shape and a number of tokens were measured; 0 when nothing is left.
    """
    name = torch.cuda.get_device_name(device)
    deadline = time.monotonic() + seconds
    missing = [
        (shape, bucket)
        for shape in dict.fromkeys(shapes)
        for bucket in BUCKETS
        if bucket not in known_choices(name).get(shape.key, {})
    ]
    if not missing:
        return 0
    timer = GemmTimer(device)
    measured: Measured = {}
    count = 0
    for shape, bucket in missing:
        measured.setdefault(shape.key, {})[bucket] = fastest(timer.times(shape, bucket))
        count += 1
        if time.monotonic() > deadline:
            break
    store_cached(name, measured)
    known_choices.cache_clear()
    return count
