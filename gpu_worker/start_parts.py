"""How long the parts of a start take, in the log. Imports no torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from shared.logging import get_logger

EVENT = "part of the start"
"""The log line's text; it has the fields ``part`` and ``seconds``."""


@contextlib.contextmanager
def part_of_start(part: str) -> Iterator[None]:
    """Log how long what is done inside takes, unless it fails."""
    began = time.perf_counter()
    yield
    get_logger().info(EVENT, part=part, seconds=round(time.perf_counter() - began, 3))
