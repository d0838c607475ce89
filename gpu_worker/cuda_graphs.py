"""Whole steps as CUDA graphs, one for each padded shape and variant, captured when first needed."""

from __future__ import annotations

import bisect
import contextlib
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator

import torch

from gpu_worker.device_clock import DeviceClock
from shared.logging import get_logger

log = get_logger()
LAUNCH_BOUND, WAITS_FOR_HOST = 1.5, 1.1
"""A step that the device computes for this many times as long as the host launches one, at its quickest and this time,
gains nothing from a graph, and the next one would wait while it is captured."""


def padded_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that steps are padded to: fine enough that padding costs little, few enough to capture."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def padded_size(rows: int, sizes: list[int]) -> int | None:
    """The least size that holds ``rows``; None: it is beyond the largest."""
    index = bisect.bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


class GraphCache:
    """Runs a function that launches kernels, or replays what it launched the first time.

    The function may read and write only memory whose address stays: static buffers, the slot state, the cache. What it
    allocates belongs to the graphs' common pool, so that graphs do not run at the same time.

    Args:
        enabled: steps are to be run in fixed shapes (not so with ``--enforce-eager``). Off a GPU nothing is captured,
            but the shapes are the same.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self._device = device
        self._captures = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]
        """Of captures, which only note what is launched."""
        self._is_worth: dict[Hashable, bool] = {}
        self._full = False
        """There was no memory for another."""
        self._launch_s = math.inf

    @property
    def captures(self) -> bool:
        """Whether there are graphs, and not only fixed shapes."""
        return self._captures

    def clear(self) -> None:
        """Forget all graphs: memory that they know has moved. Their pool ends with the last of them."""
        self._graphs.clear()
        self._full = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Launch each time instead, with the same shapes."""
        captures, self._captures = self._captures, False
        try:
            yield
        finally:
            self._captures = captures

    def __contains__(self, key: Hashable) -> bool:
        """Whether it was captured, and is replayed."""
        return self._captures and key in self._graphs

    def is_worth(self, key: Hashable) -> bool:
        """Whether such launches are known, gain from a graph, and have one or may get one."""
        return self._is_worth.get(key, False) and (key in self._graphs or not self._full)

    def note(self, key: Hashable, launch_s: float, compute_s: float) -> None:
        """The host took so long to launch it kernel by kernel, and the device to compute it; from any thread.

        Steps have as many launches whatever their shape. The least time counts: the first of a shape often includes
        loading kernels. From the second on, one that took the device no longer than the host has waited for the host,
        however slow that was.
        """
        self._launch_s = min(self._launch_s, launch_s)
        waited = key in self._is_worth and compute_s < WAITS_FOR_HOST * launch_s
        self._is_worth[key] = waited or compute_s < LAUNCH_BOUND * self._launch_s

    def note_short(self, key: Hashable, launch_s: float) -> None:
        """The host took so long to launch it kernel by kernel, and whatever that is, it gains from a graph."""
        self._launch_s = min(self._launch_s, launch_s)
        self._is_worth[key] = True

    def prepare(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launch once with inputs that change nothing, and capture what was launched, for later steps."""
        launch()
        self._is_worth[key] = True
        if self._captures:
            self._graphs[key] = self._capture(key, launch)

    def try_out(self, key: Hashable, launch: Callable[[], None]) -> bool:
        """As ``prepare``, but captured only if steps gain from it; returns whether they do."""
        launch()
        if not self._captures:
            self._is_worth[key] = True
            return True
        # The first launch has loaded kernels.
        torch.cuda.synchronize(self._device)
        clock, began = DeviceClock(self._device), time.perf_counter()
        clock.begin()
        launch()
        times, launch_s = clock.end(), time.perf_counter() - began
        torch.cuda.synchronize(self._device)
        self.note(key, launch_s, times.compute_s)
        if self._is_worth[key]:
            self._graphs[key] = self._capture(key, launch)
        return self._is_worth[key]

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launch; ``key`` says what the launches depend on beside the contents of memory."""
        if key in self or self.add(key, launch):
            self._graphs[key].replay()
        else:
            launch()

    def add(self, key: Hashable, launch: Callable[[], None]) -> bool:
        """Capture without running; returns whether there is a graph now, which there is not without memory for it."""
        if not self._captures or self._full:
            return False
        try:
            self._graphs[key] = self._capture(key, launch)
        except torch.OutOfMemoryError:
            log.warning("there is no memory for more graphs")
            self._full = True
        return not self._full

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capturing runs nothing: what is captured is replayed afterwards like any other time.

        The device computes the steps before meanwhile, since nothing waits for it and no memory is given back, which
        ``torch.cuda.graph`` does each time; only if there is no memory for the graph.
        """
        began = time.perf_counter()
        graph = self._recorded(launch)
        if graph is None:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            graph = self._recorded(launch)
        if graph is None:
            raise torch.OutOfMemoryError("there is no memory for a graph")
        log.debug("captured a graph", key=str(key), seconds=round(time.perf_counter() - began, 4))
        return graph

    def _recorded(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """None: there is no memory for it."""
        if not self._graphs:
            # The pool of graphs that are gone takes no others.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except torch.OutOfMemoryError:
                _end_in_vain(graph)
                return None
            except BaseException:
                _end_in_vain(graph)
                raise
            graph.capture_end()
        return graph


def _end_in_vain(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # Of an empty graph.
        warnings.simplefilter("ignore")
        graph.capture_end()
