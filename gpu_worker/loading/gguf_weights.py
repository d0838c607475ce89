"""Weights in a GGUF file, dequantized by threads ahead of their use.

Block formats are decoded by the ``gguf`` package; the header and the tensor data are read directly, which takes a
tenth of a second where its reader takes seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpu_worker.loading.progress import Progress
from gpu_worker.loading.weights import GgufNames, check_shape, missing, stack_taken
from shared.errors import StartupError
from shared.gguf_header import GGML_TYPES, GgufTensor, read_gguf_header

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 2**30
"""Dequantized bytes that may wait to be taken."""

Float32 = npt.NDArray[np.float32]


class GgufWeights:
    """See the module. Starts to dequantize at once, in the order of the file.

    Args:
        head_dim: of the model, to restore the order of rows that the format changed for RoPE.
        threads: that dequantize ahead.
    """

    def __init__(self, path: Path, head_dim: int, threads: int = 1) -> None:
        self.path = path
        self.head_dim = head_dim
        self.names: GgufNames | None = None
        """Set before the first ``take``."""
        self.tensors = read_gguf_header(path).tensors
        self._data = np.memmap(path, np.uint8, "r")
        self.progress = Progress(sum(t.nbytes for t in self.tensors.values()))
        self._changed = threading.Condition()
        self._pending = list(reversed(self.tensors.values()))
        self._started: set[str] = set()
        self._ready: dict[str, Float32 | Exception] = {}
        self._waiting_bytes = 0
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._work_ahead, name="dequantize", daemon=True).start()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        assert self.names is not None
        stored, interleaved = self.names.find(name)
        tensor = self.tensors.get(stored)
        if tensor is None:
            raise missing(f"{stored} ({name})", str(self.path))
        check_shape(f"{stored} ({name})", tensor.shape, shape, str(self.path))
        values = self._values(tensor)
        if interleaved:
            values = _deinterleave(values, self.head_dim)
        self.progress.update(tensor.nbytes)
        return torch.from_numpy(values)

    def find(self, name: str) -> torch.Tensor | None:
        """None: the format has nothing beside the tensors of the architecture."""
        return None

    def stack(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return stack_taken(self, names, shapes, dtype, device)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self.progress.close()

    def _values(self, tensor: GgufTensor) -> Float32:
        with self._changed:
            mine = tensor.name not in self._started
            if mine:
                self._started.add(tensor.name)
            else:
                self._changed.wait_for(lambda: tensor.name in self._ready)
                values = self._ready.pop(tensor.name)
                if isinstance(values, Exception):
                    raise values
                self._waiting_bytes -= values.nbytes
                self._changed.notify_all()
                return values
        return self._dequantize(tensor)

    def _work_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting_bytes < AHEAD_BYTES)
                while self._pending and self._pending[-1].name in self._started:
                    self._pending.pop()
                if self._closed or not self._pending:
                    return
                tensor = self._pending.pop()
                self._started.add(tensor.name)
            values: Float32 | Exception
            try:
                values = self._dequantize(tensor)
            except StartupError as error:
                values = error
            with self._changed:
                self._ready[tensor.name] = values
                self._waiting_bytes += 0 if isinstance(values, Exception) else values.nbytes
                self._changed.notify_all()

    def _dequantize(self, tensor: GgufTensor) -> Float32:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        data = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        rows = int(np.prod(tensor.shape[:-1]))
        try:
            dequantized = dequantize(data.reshape(rows, -1), GGMLQuantizationType(tensor.ggml_type))
        except (NotImplementedError, ValueError) as error:
            kind = GGML_TYPES[tensor.ggml_type][0]
            raise StartupError(
                f"the tensor {tensor.name} in {self.path} has the type {kind}, which cannot be read: {error}"
            ) from error
        values: Float32 = dequantized.astype(np.float32, copy=False).reshape(tensor.shape)
        return values if values.flags.writeable else values.copy()


def _deinterleave(values: Float32, head_dim: int) -> Float32:
    """Rows of each head from (0, half, 1, half + 1, …) back to (0, 1, …): undoes llama.cpp's ``permute``."""
    heads = values.shape[0] // head_dim
    split = values.reshape(heads, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
