"""The parts of a start: how long they take, in the log, and those that run beside the others. Imports no torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from shared.logging import get_logger

T = TypeVar("T")
EVENT = "part of the start"
"""The log line's text; it has the fields ``part`` and ``seconds``."""


@contextlib.contextmanager
def part_of_start(part: str) -> Iterator[None]:
    """Log how long what is done inside takes, unless it fails."""
    began = time.perf_counter()
    yield
    get_logger().info(EVENT, part=part, seconds=round(time.perf_counter() - began, 3))


def in_background(make: Callable[[], T]) -> Future[T]:
    """Call it in a thread that does not hold up the end of the process; the future has what it returns, or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="start-part", daemon=True).start()
    return future
