"""Reads a model's files into the page cache while torch is imported and the GPU is opened. Imports no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

THREADS = 4
PIECE_BYTES = 16 * 2**20
PROBE_BYTES = 4096
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class ReadAhead:
    """Threads that read pieces of files that are not in memory, in the order of the files.

    Does nothing for files that are in memory already, or that memory does not hold.
    """

    def __init__(self, paths: Sequence[Path], threads: int = THREADS) -> None:
        self._stopped = False
        self._pieces = _pieces(paths) if sum(path.stat().st_size for path in paths) <= available_memory() else iter(())
        self._next = threading.Lock()
        self.bytes_read = 0
        self._threads = [
            threading.Thread(target=self._read, name="read-ahead", daemon=True)
            for _ in range(threads if _NOWAIT else 0)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all is read."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Read no further piece."""
        self._stopped = True
        self.join()

    def _read(self) -> None:
        scratch = memoryview(bytearray(PIECE_BYTES))
        while not self._stopped:
            with self._next:
                piece = next(self._pieces, None)
            if piece is None:
                return
            path, offset = piece
            # Whatever is wrong with a file is reported by whoever needs its contents.
            try:
                with path.open("rb", buffering=0) as file:
                    # A page in the middle: those at the start come along with the piece before.
                    if not _in_memory(file.fileno(), offset + PIECE_BYTES // 2):
                        count = os.preadv(file.fileno(), [scratch], offset)
                        with self._next:
                            self.bytes_read += count
            except OSError:
                return


def available_memory() -> int:
    """Bytes that may be taken without swapping; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def _pieces(paths: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for path in paths:
        for offset in range(0, path.stat().st_size, PIECE_BYTES):
            yield path, offset


def _in_memory(file: int, offset: int) -> bool:
    """Whether a page can be read at once."""
    try:
        return os.preadv(file, [bytearray(PROBE_BYTES)], offset, _NOWAIT) > 0
    except BlockingIOError:
        return False
