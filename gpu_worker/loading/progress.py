"""How far the weights are loaded: a bar for a terminal, a number for everybody else. Imports no torch."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

STEP = 5


class Progress:
    """Counts the bytes of a checkpoint, and draws a bar on standard error from the first tensor on.

    There is no bar when standard error is not a terminal, or ``TQDM_DISABLE`` is set. One thread counts; any may read.

    Args:
        total_bytes: 0 when it is not known.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.loaded_bytes = 0
        self._bar: tqdm[Any] | None = None

    @property
    def percent(self) -> int | None:
        """Share that is loaded, in whole steps of ``STEP``, since each change is a line of a log; None: not known."""
        if self.total_bytes == 0:
            return None
        return min(self.loaded_bytes * 100 // self.total_bytes // STEP * STEP, 100)

    def update(self, nbytes: int) -> None:
        """So many more bytes are loaded."""
        self.loaded_bytes += nbytes
        if self._bar is None:
            self._bar = tqdm(
                total=self.total_bytes,
                desc="loading weights",
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                mininterval=0.2,
                # None: unless it is a terminal.
                disable=os.environ.get("TQDM_DISABLE", "0") != "0" or None,
            )
        self._bar.update(nbytes)

    def close(self) -> None:
        """Finish the bar; tensors that the model did not ask for count as loaded."""
        rest, self.loaded_bytes = self.total_bytes - self.loaded_bytes, self.total_bytes
        if self._bar is not None:
            self._bar.update(rest)
            self._bar.close()
