"""Random weights of a model's shape, for measurements without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpu_worker.loading.progress import Progress
from gpu_worker.loading.weights import stack_taken

if TYPE_CHECKING:
    import torch

DEVIATION = 0.02
"""Standard deviation of the elements: what most models are initialized with (``initializer_range`` of transformers), so
that activations keep the size that they have in a real model."""


class DummyWeights:
    """Tensors made where they are needed, in the model's dtype; norms are 1.

    A tensor is a function of the seed, its name, the dtype and the kind of device alone. No file is read.

    Args:
        deviation: standard deviation of the elements.
    """

    def __init__(self, seed: int, deviation: float = DEVIATION) -> None:
        self.seed = seed
        self.deviation = deviation
        self.progress = Progress(0)
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None

    def place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make tensors in ``dtype`` on ``device`` from now on; float32 on the CPU before that."""
        self._dtype, self._device = dtype, device

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        dtype, device = self._dtype or torch.float32, self._device or torch.device("cpu")
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        # torch's generator for the CPU looks at 32 bits of its seed.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, self.deviation, generator=generator)

    def find(self, name: str) -> torch.Tensor | None:
        return None

    def stack(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return stack_taken(self, names, shapes, dtype, device)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
