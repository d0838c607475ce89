"""Random weights of a model's shape, for measurements without a checkpoint."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVIATION = 0.02


class DummyWeights:
    """Every tensor is a function of the seed and its name alone; norms are 1."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        if "norm" in name:
            return torch.ones(shape)
        # torch's generator for the CPU looks at 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.empty(shape).normal_(0.0, DEVIATION, generator=generator)

    def close(self) -> None:
        pass
