"""Pieces of files copied into tensors on a GPU by threads, through small page-locked buffers.

    file (page cache) --pread--> page-locked buffer --DMA--> tensor

``pread`` copies without the page faults of a memory map and without Python's lock; a copy from page-locked memory runs
by itself, so that a thread fills one buffer while another is sent. Locking pages takes a second for a few gigabytes:
the buffers are a few megabytes each.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shared.errors import StartupError
from shared.logging import get_logger

THREADS = 8
BUFFER_BYTES = 16 * 2**20
BUFFERS = 2
"""Of each thread."""


class Piece(NamedTuple):
    """Consecutive elements of a tensor in a file, and where they belong."""

    name: str
    """The tensor's."""
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    """In the file."""
    target: torch.Tensor
    """[elements], contiguous, of any dtype."""
    ready: torch.cuda.Event | None
    """What may still use the target's memory ends before it; None: nothing does."""


class StagedCopies:
    """Threads that copy; they start with the first copy and end in ``finish`` or ``close``.

    Off a GPU the same threads copy to tensors of the CPU, through ordinary memory.

    Args:
        on_copied: called with the bytes of each piece that has been read, by one thread at a time.
    """

    def __init__(
        self,
        device: torch.device,
        on_copied: Callable[[int], None],
        *,
        threads: int = THREADS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.device = device
        self._on_copied, self._num_threads, self._buffer_bytes = on_copied, threads, buffer_bytes
        self._changed = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._finishing = False
        self._error: Exception | None = None
        self._files: dict[Path, int] = {}
        self._threads: list[threading.Thread] = []
        self._bytes = 0
        self._began = 0.0

    def copy(self, name: str, path: Path, offset: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Begin to copy a tensor of ``dtype`` at ``offset`` of a file into ``target``, a contiguous tensor."""
        flat = target.view(-1)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self.device))
        count = max(1, self._buffer_bytes // dtype.itemsize)
        with self._changed:
            for first in range(0, len(flat), count):
                part = flat[first : first + count]
                place = offset + first * dtype.itemsize
                self._pieces.append(Piece(name, path, place, len(part) * dtype.itemsize, dtype, part, ready))
            self._bytes += len(flat) * dtype.itemsize
            self._changed.notify_all()
        if not self._threads:
            self._began = time.perf_counter()
            self._threads = [
                threading.Thread(target=self._work, name="load-weights", daemon=True) for _ in range(self._num_threads)
            ]
            for thread in self._threads:
                thread.start()

    def finish(self) -> None:
        """Wait until all copies are done.

        Raises:
            StartupError: a file cannot be read, or is too short; the text names it and the tensor.
        """
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._join()
        if self._error is not None:
            raise self._error
        seconds = time.perf_counter() - self._began
        get_logger().info(
            "the weights are on the device",
            gb=round(self._bytes / 1e9, 2),
            gb_per_s=round(self._bytes / 1e9 / seconds, 1),
        )

    def close(self) -> None:
        """Copy nothing further."""
        with self._changed:
            self._pieces.clear()
            self._finishing = True
            self._changed.notify_all()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        while self._files:
            os.close(self._files.popitem()[1])

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            lane = _Lane(self.device, self._buffer_bytes)
            while (piece := self._next()) is not None:
                lane.copy(piece, self._open(piece))
                with self._changed:
                    self._on_copied(piece.nbytes)
            lane.wait()
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._pieces.clear()

    def _next(self) -> Piece | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._finishing or self._error)
            return self._pieces.popleft() if self._pieces and self._error is None else None

    def _open(self, piece: Piece) -> int:
        with self._changed:
            if piece.path not in self._files:
                try:
                    file = self._files[piece.path] = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise _unreadable(piece, error) from error
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._files[piece.path]


class _Lane:
    """One thread's buffers, and its stream on a GPU."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._buffers = deque(_Buffer(buffer_bytes, on_gpu) for _ in range(BUFFERS))
        self._device, self._buffer_bytes = device, buffer_bytes
        self._unconverted: torch.Tensor | None = None
        """On the device: what must be converted there."""

    def copy(self, piece: Piece, file: int) -> None:
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.wait()
        _read(piece, file, buffer.view[: piece.nbytes])
        with torch.cuda.stream(self._stream):
            if self._stream is not None and piece.ready is not None:
                self._stream.wait_event(piece.ready)
            self._send(buffer.bytes[: piece.nbytes].view(piece.dtype), piece.target)
            buffer.sent()

    def wait(self) -> None:
        """Until what was sent has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype != target.dtype and self._stream is not None:
            if self._unconverted is None:
                self._unconverted = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device)
            there = self._unconverted[: source.nbytes].view(source.dtype)
            source = there.copy_(source, non_blocking=True)
        target.copy_(source, non_blocking=True)


class _Buffer:
    """Memory that the device can read by itself."""

    def __init__(self, nbytes: int, on_gpu: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.view: memoryview = self.bytes.numpy().data
        self._sent = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]

    def sent(self) -> None:
        """The current stream was asked to send the contents."""
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Until the contents may be overwritten."""
        if self._sent is not None:
            self._sent.synchronize()


def _read(piece: Piece, file: int, view: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        try:
            count = os.preadv(file, [view[done:]], piece.offset + done)
        except OSError as error:
            raise _unreadable(piece, error) from error
        if not count:
            raise _unreadable(piece, "the file ends within it")
        done += count


def _unreadable(piece: Piece, reason: object) -> StartupError:
    return StartupError(f"cannot read the tensor {piece.name} in {piece.path}: {reason}")
