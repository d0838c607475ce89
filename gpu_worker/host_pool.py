"""KV blocks in host memory, beside those of the cache. The engine says which are copied; nothing here knows what is in
them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from gpu_worker.attention.base import PagedAttention
from gpu_worker.host_memory import HostMemory, available
from gpu_worker.kv_cache import KVCache
from gpu_worker.start_parts import part_of_start
from shared.errors import StartupError
from shared.messages import Int32

TO_HOST, TO_DEVICE = 0, 1
"""The directions of ``Step.transfers``."""
FLAGS = "--swap-space and --kv-offloading-size"
MEASURED_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
MEASURED_TIMES = 3
GIB = 2**30


class HostPool:
    """The pool. All of its blocks can be used; there is no null block.

    Attributes:
        tensor: [num_blocks, layers, ...]: a block of the cache with its layers side by side, of the cache's dtype.
        rates: bytes per second to the host and back, once somebody has measured them.
    """

    def __init__(
        self, num_layers: int, backend: PagedAttention, dtype: torch.dtype, device: torch.device, total_bytes: int
    ) -> None:
        """
        Args:
            device: of the cache. For a GPU the memory is page-locked.
            total_bytes: size of the pool at most.

        Raises:
            StartupError: the system has not so much memory, or not even one block fits.
        """
        shape = (num_layers, *backend.cache_shape(1)[1:])
        block_bytes = math.prod(shape) * dtype.itemsize
        self.num_blocks = total_bytes // block_bytes
        if not self.num_blocks:
            raise StartupError(f"{FLAGS} give {total_bytes} bytes of host memory, and one KV block takes {block_bytes}")
        size = self.num_blocks * block_bytes
        room = available()
        if room is not None and size > room:
            raise StartupError(
                f"{FLAGS} ask for {size / GIB:.1f} GiB of host memory, but {room / GIB:.1f} GiB are available"
            )
        with part_of_start("host memory"):
            try:
                self._memory = HostMemory(size, locked=device.type == "cuda")
            except (OSError, RuntimeError) as error:
                raise StartupError(
                    f"{FLAGS} ask for {size / GIB:.1f} GiB of host memory, which the system refuses: {error}"
                ) from error
        self.tensor = self._memory.bytes.view(dtype).view(self.num_blocks, *shape)
        self.rates = (0.0, 0.0)

    def copy(self, cache: KVCache, transfers: Int32) -> None:
        """Copy whole blocks between the pool and a cache on the CPU.

        Args:
            transfers: [t, 3] as of ``Step``.
        """
        for direction, block, host_block in transfers.tolist():
            here, there = cache.tensor[:, block], self.tensor[host_block]
            if direction == TO_HOST:
                there.copy_(here)
            else:
                here.copy_(there)

    def seconds_of_copy(self, cache: KVCache, transfers: Int32) -> float:
        """How long ``copy`` takes."""
        began = time.perf_counter()
        self.copy(cache, transfers)
        return time.perf_counter() - began

    def close(self) -> None:
        """Give the memory back; nobody must use it any more."""
        self.tensor = self.tensor[:0].clone()
        self._memory.close()


def measure_rates(seconds_of: Callable[[Int32], float], cache: KVCache, pool: HostPool) -> tuple[float, float]:
    """Bytes per second to the host and back, the best of a few times. What is in the cache stays what it was.

    Args:
        seconds_of: does transfers and says how long they took.
    """
    wanted = MEASURED_BYTES[cache.tensor.device.type] // cache.block_bytes
    count = max(1, min(wanted, cache.num_blocks - 1, pool.num_blocks))
    numbers = np.arange(count, dtype=np.int32)
    to_host, to_device = (
        np.stack([np.full(count, direction, np.int32), 1 + numbers, numbers], 1) for direction in (TO_HOST, TO_DEVICE)
    )
    out_s = min(seconds_of(to_host) for _ in range(MEASURED_TIMES))
    in_s = min(seconds_of(to_device) for _ in range(MEASURED_TIMES))
    return count * cache.block_bytes / out_s, count * cache.block_bytes / in_s
