"""Transfers of KV blocks between a GPU and host memory, beside the steps that run: neither waits for the other.

    to the host      cache ──gather──▶ piece ──copy engine──▶ pool
    to the device    cache ◀──scatter── piece ◀──copy engine── pool

Pieces of the device's memory are filled and emptied in turn, so that the bus carries one while a kernel works at the
other. Kernels that reach into host memory themselves would need no pieces, but sit on multiprocessors for as long as
the bus takes, and steps wait for those.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from gpu_worker.host_pool import TO_DEVICE, TO_HOST, HostPool
from gpu_worker.kernels.block_transfer import gather_blocks, scatter_blocks, words_of
from gpu_worker.kv_cache import KVCache
from shared.messages import Int32, Step

PIECE_BYTES = 32 * 2**20
"""At most, but one block at least: what the bus carries in the time that the launches for another piece take, twice."""
PIECES = 3
"""Of each direction: one for the bus, one for the kernel, and one that the thread may be late with."""
COPY_BYTES = 4 * 2**20
"""The most that a copy engine carries at a time, if blocks are smaller: what steps bring and return waits behind it."""
POLL_S = 2e-4


def bytes_of_pieces(block_bytes: int) -> int:
    """What transfers take of the device's memory.

    Args:
        block_bytes: of a block in all layers.
    """
    return 2 * PIECES * max(block_bytes, PIECE_BYTES)


class CudaTransfers:
    """Starts the transfers of steps. Each direction has streams and a thread of its own: the bus carries both at once,
    and the thread that launches steps is not held up by the launches of many copies.

    Off a GPU, where kernels are interpreted, they are complete when they have been started.
    """

    def __init__(self, cache: KVCache, pool: HostPool | None, piece_bytes: int = PIECE_BYTES) -> None:
        """
        Args:
            pool: None: no step has transfers.
            piece_bytes: as of ``PIECE_BYTES``.
        """
        self.pool = pool
        self._lanes = [] if pool is None else [_Lane(way, cache, pool, piece_bytes) for way in (TO_HOST, TO_DEVICE)]
        """By direction."""
        self._pending = PendingTransfers()
        """Of this epoch."""
        if self._lanes and cache.tensor.is_cuda:
            # Whatever was launched before on the memory of the cache or of the pieces is over.
            torch.cuda.synchronize(cache.tensor.device)

    def reset(self) -> None:
        """Wait for what runs: others may use its blocks from now on."""
        for lane in self._lanes:
            lane.wait()
        self._pending = PendingTransfers()

    def close(self) -> None:
        """Give the pieces back, when what runs is over; nothing is started any more."""
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def start(self, step: Step) -> Callable[[], int]:
        """Start the transfers of a step.

        Returns:
            What tells up to which step all transfers are complete. For a step without rows it waits as
            ``StepResult.transferred`` says. Called once, by the thread that waits for results.
        """
        started: list[Transfers] = []
        for direction in (TO_HOST, TO_DEVICE) if len(step.transfers) else ():
            pairs = step.transfers[step.transfers[:, 0] == direction, 1:]
            if len(pairs):
                started.append(self._lanes[direction].start(pairs))
        with_rows = len(step.prefill) + len(step.decode) > 0
        self._pending.add(step.number, started, with_rows)
        return functools.partial(self._pending.complete, step.number, wait=not with_rows)

    def seconds_of(self, transfers: Int32) -> float:
        """Do transfers of one direction, with nothing else on the way, and say how long they took."""
        began = time.perf_counter()
        self._lanes[int(transfers[0, 0])].start(transfers[:, 1:]).wait()
        return time.perf_counter() - began


class _Lane:
    """The transfers of one direction, in order.

    At each piece a kernel and copies work one after the other, on streams of their own: the second waits for the first.
    The thread goes on when a piece is free, so that no more than the pieces is ever queued on the device: a queue that
    is full would hold up other launches.
    """

    def __init__(self, direction: int, cache: KVCache, pool: HostPool, piece_bytes: int) -> None:
        self._to_host, self._cache, self._pool = direction == TO_HOST, cache, pool
        layers, device = len(cache.tensor), cache.tensor.device
        self._capacity = max(1, min(piece_bytes // cache.block_bytes, pool.num_blocks))
        """Blocks of a piece."""
        self._most = max(1, COPY_BYTES // cache.block_bytes)
        """Blocks of a copy."""
        shape = (self._capacity, layers, cache.block_bytes // layers // torch.int32.itemsize)
        self._pieces = deque(_Piece(shape, device) for _ in range(PIECES))
        """The one that was used first comes first."""
        self._streams: list[torch.cuda.Stream] = []
        """Of what is done first at a piece, and of what is done then; none off a GPU."""
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(1, "transfers", torch.cuda.set_device, (device,))

    def start(self, pairs: Int32) -> Transfers:
        """Transfer ``pairs`` [n, 2]: block of the cache, block of the pool."""
        if self._thread is None:
            self._launch(pairs)
            return Transfers(None)
        return Transfers(self._thread.submit(self._launch_and_mark, pairs))

    def wait(self) -> None:
        """Wait for all that was started."""
        if self._thread is not None:
            self._thread.submit(self._streams[1].synchronize).result()

    def close(self) -> None:
        """Wait for all that was started, and end the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()

    def _launch_and_mark(self, pairs: Int32) -> torch.cuda.Event:
        """Returns the end of all of it."""
        self._launch(pairs)
        end: torch.cuda.Event = self._streams[1].record_event()
        return end

    @torch.inference_mode()
    def _launch(self, pairs: Int32) -> None:
        pairs = pairs[np.argsort(pairs[:, 1])]
        for first in range(0, len(pairs), self._capacity):
            self._launch_piece(pairs[first : first + self._capacity])

    def _launch_piece(self, pairs: Int32) -> None:
        piece, count = self._pieces[0], len(pairs)
        self._pieces.rotate(-1)
        if piece.free is not None:
            piece.free.synchronize()
        piece.host_blocks.numpy()[:count] = pairs[:, 0]
        words, blocks, cache, host = piece.words[:count], piece.blocks[:count], self._cache.tensor, self._pool.tensor
        work = [
            functools.partial(gather_blocks if self._to_host else scatter_blocks, cache, blocks, words),
            functools.partial(copy_runs, words_of(host), pairs[:, 1].tolist(), words, self._to_host, self._most),
        ]
        first, then = self._streams or (None, None)
        begin, end = work if self._to_host else reversed(work)
        with torch.cuda.stream(first):
            blocks.copy_(piece.host_blocks[:count], non_blocking=True)
            begin()
        with torch.cuda.stream(then):
            if first is not None and then is not None:
                then.wait_stream(first)
            end()
            if piece.free is not None:
                piece.free.record()


class _Piece:
    """Blocks on their way, and where in the cache they belong.

    Args:
        shape: [blocks, layers, words of a block of a layer].
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.empty(shape, dtype=torch.int32, device=device)
        self.blocks = torch.empty(shape[0], dtype=torch.int32, device=device)
        self.host_blocks = torch.empty(shape[0], dtype=torch.int32, pin_memory=on_gpu)
        self.free = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        """The end of its last use; none off a GPU."""


class Transfers:
    """Those of a step in one direction; they may still have to be launched.

    Args:
        end: the end of them, once they are launched; None: they are complete.
    """

    def __init__(self, end: Future[torch.cuda.Event] | None) -> None:
        self._end = end

    def query(self) -> bool:
        """Whether they are complete. Raises what their launch failed of."""
        return self._end is None or (self._end.done() and self._end.result().query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until they are complete."""
        if self._end is not None:
            self._end.result().synchronize()


def copy_runs(host: torch.Tensor, numbers: list[int], piece: torch.Tensor, to_host: bool, most: int) -> None:
    """Copy blocks between a piece and the pool, neighbours together; on a GPU, on the current stream.

    Args:
        host: [host blocks, layers, words].
        numbers: of the blocks in the pool, ascending: ``numbers[i]`` belongs to ``piece[i]``.
        most: blocks of one copy.
    """
    lengths, gaps = [1], []
    for before, number in itertools.pairwise(numbers):
        if number == before + 1 and lengths[-1] < most:
            lengths[-1] += 1
        else:
            lengths.append(1)
            gaps.append(number - before - 1)
    sizes = [*itertools.chain.from_iterable(zip(lengths, gaps, strict=False)), lengths[-1]]
    there, here = torch.split(host[numbers[0] : numbers[-1] + 1], sizes)[::2], torch.split(piece, lengths)
    # One call, which does not hold the interpreter's lock: torch copies them one by one.
    torch._foreach_copy_(*((there, here) if to_host else (here, there)), non_blocking=True)


def rehearse_transfers(cache: KVCache) -> None:
    """Launch each kernel once, for it to be compiled; the null block goes to a piece and back."""
    layers, _, size = words_of(cache.tensor).shape
    piece = torch.empty((1, layers, size), dtype=torch.int32, device=cache.tensor.device)
    blocks = torch.zeros(1, dtype=torch.int32, device=cache.tensor.device)
    gather_blocks(cache.tensor, blocks, piece)
    scatter_blocks(cache.tensor, blocks, piece)


class PendingTransfers:
    """Which steps have transfers that are not known to be complete. ``add`` is called by the thread that launches, in
    the order of the steps, and ``complete`` by the one that waits for their results, in the same order."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[Transfers]]] = deque()
        self._last_with_rows = 0
        self._with_rows = threading.Condition()

    def add(self, number: int, transfers: list[Transfers], with_rows: bool) -> None:
        """Enter a step and the ends of its transfers."""
        if transfers:
            self._steps.append((number, transfers))
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
            first, transfers = self._steps[0]
            if not (_are_over(transfers) or (wait and self._wait_for(transfers, number))):
                return first - 1
            self._steps.popleft()
        return number

    def _wait_for(self, transfers: list[Transfers], number: int) -> bool:
        """Whether they are over, at last."""
        with self._with_rows:
            while not _are_over(transfers):
                if self._last_with_rows > number:
                    return False
                self._with_rows.wait(POLL_S)
        return True


def _are_over(transfers: list[Transfers]) -> bool:
    return all(each.query() for each in transfers)
