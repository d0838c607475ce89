"""Transfers of KV blocks between a GPU and host memory, beside the steps that run: neither waits for the other."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from gpu_worker.host_pool import TO_DEVICE, TO_HOST, HostPool
from gpu_worker.kernels.block_transfer import PROGRAMS, transfer_blocks
from gpu_worker.kv_cache import KVCache
from shared.messages import Int32, Step

POLL_S = 2e-4


class CudaTransfers:
    """Starts the transfers of steps, on a stream for each direction: the bus carries both at once.

    Off a GPU, where kernels are interpreted, they are complete when they have been started.
    """

    def __init__(self, cache: KVCache, pool: HostPool | None, programs: int = PROGRAMS) -> None:
        """
        Args:
            pool: None: no step has transfers.
            programs: as of ``transfer_blocks``.
        """
        self.pool, self.programs = pool, programs
        self._cache, self._device = cache, cache.tensor.device
        self._streams: list[torch.cuda.Stream] = []
        """By direction; none off a GPU."""
        if pool is not None and self._device.type == "cuda":
            self._streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._pending = PendingTransfers()
        """Of this epoch."""

    def reset(self) -> None:
        """Wait for what runs: others may use its blocks from now on."""
        for stream in self._streams:
            stream.synchronize()
        self._pending = PendingTransfers()

    def start(self, step: Step) -> Callable[[], int]:
        """Start the transfers of a step.

        Returns:
            What tells up to which step all transfers are complete. For a step without rows it waits as
            ``StepResult.transferred`` says. Called once, by the thread that waits for results.
        """
        events: list[torch.cuda.Event] = []
        for direction in (TO_HOST, TO_DEVICE) if len(step.transfers) else ():
            pairs = step.transfers[step.transfers[:, 0] == direction, 1:]
            if len(pairs) and (event := self._launch(direction, pairs)) is not None:
                events.append(event)
        with_rows = len(step.prefill) + len(step.decode) > 0
        self._pending.add(step.number, events, with_rows)
        return functools.partial(self._pending.complete, step.number, wait=not with_rows)

    def seconds_of(self, transfers: Int32) -> float:
        """Do transfers of one direction, and say how long they took on the device."""
        direction, pairs = int(transfers[0, 0]), transfers[:, 1:]
        if not self._streams:
            began = time.perf_counter()
            self._launch(direction, pairs)
            return time.perf_counter() - began
        stream = self._streams[direction]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(stream)
        self._launch(direction, pairs)
        end.record(stream)
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def copy(self, pairs: torch.Tensor, direction: int) -> None:
        """Launch the transfers of one direction on the current stream; ``pairs`` as of ``transfer_blocks``."""
        assert self.pool is not None
        to_host = direction == TO_HOST
        transfer_blocks(self._cache.tensor, self.pool.tensor, pairs, to_host=to_host, programs=self.programs)

    def _launch(self, direction: int, pairs: Int32) -> torch.cuda.Event | None:
        """Returns an event after it, on a GPU."""
        stream = self._streams[direction] if self._streams else None
        numbers = torch.from_numpy(np.ascontiguousarray(pairs))
        with torch.cuda.stream(stream):
            # Both allocators know the stream, so that neither memory is used again too early.
            there = numbers.pin_memory().to(self._device, non_blocking=True) if stream is not None else numbers
            self.copy(there, direction)
            return stream.record_event() if stream is not None else None


def rehearse_transfers(cache: KVCache) -> None:
    """Launch each kernel once, for it to be compiled; the null block goes to memory of the device's own and back."""
    layers, _, *shape = cache.tensor.shape
    place = cache.tensor.new_empty((1, layers, *shape))
    pairs = torch.zeros((1, 2), dtype=torch.int32, device=cache.tensor.device)
    for to_host in (True, False):
        transfer_blocks(cache.tensor, place, pairs, to_host=to_host)


class PendingTransfers:
    """Which steps have transfers that are not known to be complete. ``add`` is called by the thread that launches, in
    the order of the steps, and ``complete`` by the one that waits for their results, in the same order."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[torch.cuda.Event]]] = deque()
        self._last_with_rows = 0
        self._with_rows = threading.Condition()

    def add(self, number: int, events: list[torch.cuda.Event], with_rows: bool) -> None:
        """Enter a step and the ends of its transfers."""
        if events:
            self._steps.append((number, events))
        if with_rows:
            with self._with_rows:
                self._last_with_rows = number
                self._with_rows.notify_all()

    def complete(self, number: int, *, wait: bool) -> int:
        """The step up to which all transfers are complete, ``number`` at most.

        Args:
            wait: for all of them, but no longer than until a later step with rows is there, whose result must not wait
                behind this one's.
        """
        while self._steps and self._steps[0][0] <= number:
            first, events = self._steps[0]
            if not (_are_over(events) or (wait and self._wait_for(events, number))):
                return first - 1
            self._steps.popleft()
        return number

    def _wait_for(self, events: list[torch.cuda.Event], number: int) -> bool:
        """Whether they are over, at last."""
        with self._with_rows:
            while not _are_over(events):
                if self._last_with_rows > number:
                    return False
                self._with_rows.wait(POLL_S)
        return True


def _are_over(events: list[torch.cuda.Event]) -> bool:
    return all(event.query() for event in events)  # type: ignore[no-untyped-call]
