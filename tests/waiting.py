"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], Any],
    seconds: float = 20.0,
    *,
    every_s: float = 0.02,
    meanwhile: Callable[[], Any] = lambda: None,
) -> None:
    """Ask every ``every_s`` until it is so, and call ``meanwhile`` each time that it is not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        meanwhile()
        time.sleep(every_s)
