"""Host memory in one piece, which a GPU's copy engines read and write by themselves: made present, locked."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.loading.read_ahead import available_memory
from gpu_worker.threads import usable_cores

THREADS = 8
PIECE_BYTES = 256 * 2**20
"""What a thread makes present at a time."""
PORTABLE = 1
"""Flag of cudaHostRegister: for all contexts."""
CGROUP = Path("/sys/fs/cgroup")


class HostMemory:
    """Zeros. Pages that nobody writes take no memory, unless they are locked.

    ``torch.empty(pin_memory=True)`` would round the size up to a power of two, and zero gigabytes of small pages in one
    thread.

    Attributes:
        bytes: [nbytes] uint8 on the CPU.
    """

    def __init__(self, nbytes: int, *, locked: bool) -> None:
        """
        Args:
            locked: let the GPU copy to and from it.

        Raises:
            OSError: the system does not give so much.
            RuntimeError: it cannot be locked.
        """
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Not every kernel has them.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(mapping, np.uint8)
        self.bytes = torch.from_numpy(pages)
        self._unlock = None
        if locked:
            _make_present(pages)
            _lock(pages)
            # Holds the pages until they are unlocked.
            self._unlock = weakref.finalize(self, _unlock, pages)
            self._unlock.atexit = False

    def close(self) -> None:
        """Unlock it; the GPU must not use it any more. It is given back when no tensor of it is left."""
        if self._unlock is not None:
            self._unlock()
        self.bytes = self.bytes[:0].clone()


def available() -> int | None:
    """Bytes that may be taken without swapping, also in this container; None where the system does not say."""
    found = [size for size in (available_memory() or None, _room_in_cgroup()) if size is not None]
    return min(found, default=None)


def _room_in_cgroup() -> int | None:
    """Up to the limit of a container; cached files make room. None: there is no limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - used + int(stat.get("inactive_file", 0)) if limit.isdigit() else None


def _make_present(pages: npt.NDArray[np.uint8]) -> None:
    """Have each page zeroed by the system, by several threads at a time: locking does it with one."""

    def touch(first: int) -> None:
        pages[first : first + PIECE_BYTES : mmap.PAGESIZE].fill(0)

    with ThreadPoolExecutor(min(THREADS, usable_cores()), "host-memory") as threads:
        list(threads.map(touch, range(0, len(pages), PIECE_BYTES)))


def _lock(pages: npt.NDArray[np.uint8]) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(pages.ctypes.data, len(pages), PORTABLE)
    if int(error):
        raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(error)}")


def _unlock(pages: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(pages.ctypes.data)  # type: ignore[no-untyped-call]
