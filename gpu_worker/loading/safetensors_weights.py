"""Weights in safetensors files; only those that the index names are opened.

On a CPU they are mapped into memory; to a GPU they are copied by ``staged_copies``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_worker.loading.progress import Progress
from gpu_worker.loading.read_ahead import ReadAhead
from gpu_worker.loading.safetensors_header import DTYPES, StoredTensor, read_header
from gpu_worker.loading.weights import check_shape, missing, stack_taken
from shared.errors import StartupError

if TYPE_CHECKING:
    import torch

    from gpu_worker.loading.staged_copies import StagedCopies

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsWeights:
    """A folder with ``model.safetensors.index.json`` and its shards, or with ``model.safetensors``.

    Args:
        read_ahead: begin to read the files into the page cache at once.
    """

    def __init__(self, folder: Path, *, read_ahead: bool = False) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._copies: StagedCopies | None = None
        self._file_of = _read_index(folder)
        names = sorted(set(self._file_of.values())) if self._file_of is not None else [SINGLE_FILE]
        for name in names:
            if not (folder / name).is_file():
                raise StartupError(f"the file {name} with weights is missing in {folder}; is the checkpoint complete?")
        self.progress = Progress(sum((folder / name).stat().st_size for name in names))
        self._ahead = ReadAhead([folder / name for name in names]) if read_ahead else None

    def stage(self, copies: StagedCopies) -> None:
        """Let ``copies`` do what ``stack`` asks for, from now on. They end with these weights."""
        self._copies = copies

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._file(name)
        handle = self._open(file)
        if name not in handle.keys():  # noqa: SIM118 - not a dict
            raise missing(name, f"{self.folder / file}")
        tensor: torch.Tensor = handle.get_tensor(name)
        check_shape(name, tuple(tensor.shape), shape, f"{self.folder / file}")
        self.progress.update(tensor.nbytes)
        return tensor

    def find(self, name: str) -> torch.Tensor | None:
        file = SINGLE_FILE if self._file_of is None else self._file_of.get(name)
        if file is None or name not in self._open(file).keys():  # noqa: SIM118 - not a dict
            return None
        tensor: torch.Tensor = self._open(file).get_tensor(name)
        self.progress.update(tensor.nbytes)
        return tensor

    def stack(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self._copies is None:
            return stack_taken(self, names, shapes, dtype, device)
        import torch

        stored = [self._stored(name, shape) for name, shape in zip(names, shapes, strict=True)]
        rows = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=device)
        for name, (path, tensor), part in zip(names, stored, torch.split(stacked, rows), strict=True):
            self._copies.copy(name, path, tensor.offset, getattr(torch, tensor.dtype), part)
        return stacked

    def finish(self) -> None:
        if self._copies is not None:
            self._copies.finish()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        if self._copies is not None:
            self._copies.close()
        self._files.clear()
        self.progress.close()

    def _file(self, name: str) -> str:
        file = SINGLE_FILE if self._file_of is None else self._file_of.get(name)
        if file is None:
            raise missing(name, f"{self.folder / INDEX_FILE}")
        return file

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[Path, StoredTensor]:
        file = self._file(name)
        path = self.folder / file
        if file not in self._headers:
            self._headers[file] = read_header(path)
        tensor = self._headers[file].get(name)
        if tensor is None:
            raise missing(name, str(path))
        check_shape(name, tensor.shape, shape, str(path))
        if tensor.dtype not in (dtype for dtype, _ in DTYPES.values()):
            raise StartupError(f"the tensor {name} in {path} has the type {tensor.dtype}, which cannot be read")
        return path, tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                self._files[file] = safe_open(str(self.folder / file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"cannot read the weights in {self.folder / file}: {error}") from error
        return self._files[file]


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise StartupError(f"cannot read the index of weights {path}: {error}") from error
