"""Small arrays to the device and back without a wait: pinned buffers, used in turn."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.device_clock import stream_of_steps
from gpu_worker.kernels.host_write import write_to_host

Int32 = npt.NDArray[np.int32]
DEPTH = 4
"""Buffers that are used in turn: the steps in flight, the one that is made, and one to spare."""


class Staging:
    """Carries the arrays of each step to the device in one copy.

    The copy runs on a stream of its own, so that it passes the steps that still compute. A buffer is written again only
    when the step that read it is done (``release`` marks that). Steps run on the stream that is current when this is
    made.

    Args:
        capacity: int32 values that one buffer holds at first; it grows when a step needs more.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 16) -> None:
        self._device = device
        self._steps = stream_of_steps(device)
        self._stream = torch.cuda.Stream(device) if self._steps is not None else None  # type: ignore[no-untyped-call]
        self._empty: dict[tuple[int, ...], torch.Tensor] = {}
        """By shape."""
        self._buffers = [_Buffer(capacity, device) for _ in range(DEPTH)]
        self._turn = 0

    def copy(self, *arrays: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """The arrays as int32 tensors on the device, each of its array's shape; valid until ``release`` and for three
        more calls. The stream of steps waits for the copy, the host does not.

        Each begins at a multiple of 16 bytes.
        """
        starts = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)])
        buffer = self._next(int(starts[-1]))
        for array, start in zip(arrays, starts, strict=False):
            buffer.numpy[start : start + array.size] = array.reshape(-1)
        total = int(starts[-1])
        if self._stream is None or self._steps is None:
            buffer.device[:total].copy_(buffer.host[:total])
        else:
            with torch.cuda.stream(self._stream):
                buffer.device[:total].copy_(buffer.host[:total], non_blocking=True)
            self._steps.wait_stream(self._stream)
        return [self._part(buffer, array.shape, start) for array, start in zip(arrays, starts.tolist(), strict=False)]

    def release(self) -> None:
        """All that reads the last copy has been launched."""
        if (done := self._buffers[self._turn].done) is not None:
            done.record(self._steps)

    def _part(self, buffer: _Buffer, shape: tuple[int, ...], start: int) -> torch.Tensor:
        """Of the buffer on the device; most steps bring little, and what is empty need not be cut out of it."""
        size = math.prod(shape)
        if size:
            part = buffer.device[start : start + size]
            return part.view(shape) if len(shape) > 1 else part
        if shape not in self._empty:
            self._empty[shape] = torch.empty(shape, dtype=torch.int32, device=self._device)
        return self._empty[shape]

    def _next(self, size: int) -> _Buffer:
        self._turn = (self._turn + 1) % DEPTH
        buffer = self._buffers[self._turn]
        if buffer.done is not None:
            buffer.done.synchronize()
        if buffer.host.numel() < size:
            buffer = self._buffers[self._turn] = _Buffer(2 * size, self._device)
        return buffer


class _Buffer:
    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.int32, pin_memory=cuda)
        self.numpy: Int32 = self.host.numpy()
        self.device = torch.empty(size, dtype=torch.int32, device=device)
        self.done: torch.cuda.Event | None = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]


class Returned:
    """Tensors on their way to the host."""

    def __init__(self, host: list[torch.Tensor], event: torch.cuda.Event | None) -> None:
        """
        Args:
            event: when they are there; None: they are.
        """
        self._host, self._event = host, event

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host; waits without holding the interpreter's lock."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Returns:
    """Brings results to the host, behind what the current stream does, without a copy engine (``host_write``).

    That stream is the one that is current when this is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_of_steps(device)
        self._pending: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        """Host memory that may yet be written; nobody else gets it until then, whoever has dropped the result."""

    def send(self, tensors: list[torch.Tensor]) -> Returned:
        """Begin to copy contiguous tensors of multiples of 4 bytes."""
        if not tensors or not tensors[0].is_cuda:
            return Returned([tensor.clone() for tensor in tensors], None)
        while self._pending and self._pending[0][0].query():  # type: ignore[no-untyped-call]
            self._pending.popleft()
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for here, there in zip(tensors, host, strict=True):
            write_to_host(here, there)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._pending.append((event, host))
        return Returned(host, event)
