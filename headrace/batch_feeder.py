"""Gives the items of a blocking iterator to coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feeder(Generic[T]):
    """A thread that draws from an iterator when, and only when, a coroutine of the running loop asks for an item.

    It is a daemon thread, because nothing can wake it while it waits for input.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._loop = asyncio.get_running_loop()
        self._wanted: queue.SimpleQueue[asyncio.Future[T | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    async def next(self) -> T | None:
        """The next item, or None when there are no more. Raises what the iterator raised."""
        future: asyncio.Future[T | None] = self._loop.create_future()
        self._wanted.put(future)
        return await future

    def close(self) -> None:
        """Let the thread end, now or when its iterator gives the item that it waits for."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (future := self._wanted.get()) is not None:
            item: T | None = None
            error: Exception | None = None
            try:
                item = next(self._items, None)
            except Exception as caught:
                error = caught
            # The loop may be closed when the input comes at last.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_settle, future, item, error)


def _settle(future: asyncio.Future[T | None], item: T | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(item)
