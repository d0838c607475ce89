"""Weights in safetensors files, memory-mapped; only the files that the index names are opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_worker.loading.progress import Progress
from gpu_worker.loading.weights import check_shape, missing
from shared.errors import StartupError

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsWeights:
    """A folder with ``model.safetensors.index.json`` and its shards, or with ``model.safetensors``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = _read_index(folder)
        names = sorted(set(self._file_of.values())) if self._file_of is not None else [SINGLE_FILE]
        for name in names:
            if not (folder / name).is_file():
                raise StartupError(f"the file {name} with weights is missing in {folder}; is the checkpoint complete?")
        self.progress = Progress(sum((folder / name).stat().st_size for name in names))

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = SINGLE_FILE if self._file_of is None else self._file_of.get(name)
        if file is None:
            raise missing(name, f"{self.folder / INDEX_FILE}")
        handle = self._open(file)
        if name not in handle.keys():  # noqa: SIM118 - not a dict
            raise missing(name, f"{self.folder / file}")
        tensor: torch.Tensor = handle.get_tensor(name)
        check_shape(name, tuple(tensor.shape), shape, f"{self.folder / file}")
        self.progress.update(tensor.nbytes)
        return tensor

    def close(self) -> None:
        self._files.clear()
        self.progress.close()

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
