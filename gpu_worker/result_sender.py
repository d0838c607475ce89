"""The results link: a thread with a socket of its own sends what the steps computed, in order."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shared.logging import get_logger
from shared.messages import Epoch, Hello, StepResult, WorkerFailed
from shared.transport import Connector

if TYPE_CHECKING:
    from gpu_worker.step_output import Launched

Outgoing: TypeAlias = "tuple[Epoch, Launched] | WorkerFailed"

log = get_logger()
RETRY_S = 0.01
NO_COUNTS = np.zeros(0, np.int32)


class ResultSender:
    """Takes launched steps from the main thread, waits for their tokens and sends them.

    Args:
        connect: makes the link; called in the thread, which owns it.
        hello: makes the sign of life of this link.
        beat_s: seconds between two of them.
    """

    def __init__(self, connect: Callable[[], Connector], hello: Callable[[], Hello], beat_s: float) -> None:
        self._connect, self._hello, self._beat_s = connect, hello, beat_s
        self._queue: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._unsent: collections.deque[StepResult | WorkerFailed] = collections.deque()
        self._epoch: Epoch | None = None
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, epoch: Epoch) -> None:
        """From now on only what belongs to ``epoch`` is sent."""
        self._epoch = epoch

    def put(self, outgoing: Outgoing) -> None:
        """Send the result of a launched step, or that a step failed, after all that was put before."""
        self._queue.put(outgoing)

    def stop(self) -> None:
        """Send what is ready, and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        link = self._connect()
        beats = Beats(link, self._hello, self._beat_s)
        try:
            while self._turn():
                self._flush(link)
                beats.beat()
                while link.receive() is not None:
                    pass
            self._flush(link)
        finally:
            link.close()

    def _turn(self) -> bool:
        """Wait for the next item; False at the end."""
        try:
            item = self._queue.get(timeout=RETRY_S if self._unsent else self._beat_s / 4)
        except queue.Empty:
            return True
        if item is None:
            return False
        message = self._message_of(item)
        if message is not None:
            self._unsent.append(message)
        return True

    def _message_of(self, item: Outgoing) -> StepResult | WorkerFailed | None:
        if isinstance(item, WorkerFailed):
            return item
        epoch, launched = item
        try:
            output = launched.wait()
        except Exception as error:
            log.exception("a step failed on the device", step=launched.number)
            return WorkerFailed(epoch, launched.number, f"{type(error).__name__}: {error}")
        return StepResult(
            epoch,
            launched.number,
            output.tokens,
            NO_COUNTS,
            logprobs=output.logprobs,
            compute_s=output.compute_s,
            prompt_logprobs=output.prompt_logprobs,
            idle_s=output.idle_s,
            transferred=output.transferred,
        )

    def _flush(self, link: Connector) -> None:
        while self._unsent:
            message = self._unsent[0]
            if message.epoch == self._epoch and not link.send(message):
                return
            self._unsent.popleft()


class Beats:
    """Says Hello on a link at once, as soon as it is connected, and every ``beat_s`` seconds."""

    def __init__(self, link: Connector, hello: Callable[[], Hello], beat_s: float) -> None:
        self._link, self._hello, self._beat_s = link, hello, beat_s
        self._next = 0.0
        self.connected = False
        """Whether there was somebody to say the last one to."""

    def beat(self) -> None:
        """Say Hello if it is due; while nobody is connected it stays due."""
        if time.monotonic() >= self._next:
            self.beat_now()

    def beat_now(self) -> None:
        self.connected = self._link.send(self._hello())
        if self.connected:
            self._next = time.monotonic() + self._beat_s
