"""A link of ``shared.transport`` on an asyncio event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.transport import Link, Received

PUMP_BATCH = 256
"""Messages that a pump hands on before it lets the event loop run."""
PUMP_S = 0.02
"""Seconds after which it does so anyway: a message may hold rows for a thousand streams."""


class Pump:
    """Hands the messages of one link to a callback on an asyncio event loop.

    ZeroMQ's descriptor is edge-triggered: it signals that the socket's state *changed*, and any call on the socket,
    a send included, may swallow that signal. So after each signal and after each send the state itself is read, until
    nothing is left. A batch is bounded, in number and time, so that a flood does not starve the loop.
    """

    def __init__(self, link: Link, on_message: Callable[[Received], None]) -> None:
        self._link = link
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = self._monitor_fd = -1
        self._scheduled = False

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin; ``loop`` defaults to the running one."""
        self._loop = loop or asyncio.get_running_loop()
        self._fd = self._link.socket.fileno()
        self._loop.add_reader(self._fd, self._drain)
        self._link.on_sent = self._schedule
        if self._link.monitor is not None:
            self._monitor_fd = self._link.monitor.fileno()
            self._loop.add_reader(self._monitor_fd, self._follow)
            self._loop.call_soon(self._follow)  # it signals what comes after it was found empty
        self._schedule()

    def stop(self) -> None:
        """End; call it before the link is closed. May be called again."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            if self._monitor_fd >= 0:
                self._loop.remove_reader(self._monitor_fd)
            self._link.on_sent = None
            self._loop = None

    def _schedule(self) -> None:
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def _follow(self) -> None:
        try:
            if self._loop is not None:
                self._link.follow()
        finally:
            self._schedule()

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        end = time.monotonic() + PUMP_S
        for _ in range(PUMP_BATCH):
            if self._loop is None or not self._link.readable:
                return
            received = self._link.receive()
            if received is None:
                continue
            try:
                self._on_message(received)
            except BaseException:
                self._schedule()  # the loop reports the error; the messages behind it must not wait for a signal
                raise
            if time.monotonic() >= end:
                break
        self._schedule()
