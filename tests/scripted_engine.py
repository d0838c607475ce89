"""Plays the engine's part for one worker that is a process of its own, over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from runner_harness import make_step, slot_init

from shared.config import ENGINE
from shared.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, Epoch, Hello, Init, Ready, StepResult, WorkerConfig
from shared.transport import Listener, Poller, new_boot

ROOT = Path(__file__).parents[1]
PROMPT = [7, 30, 200, 14, 90, 11]
MODULE = ("-m", "gpu_worker")
HELLO = Hello(ENGINE, "scripted", OLDEST_PROTOCOL, PROTOCOL_VERSION, True, None)
M = TypeVar("M")


class ScriptedEngine:
    """Binds the worker endpoint in ``folder`` and starts a worker on the CPU.

    Args:
        flags: further flags of the worker.
        program: what Python runs.
    """

    def __init__(self, folder: Path, *flags: str, program: Sequence[str] = MODULE) -> None:
        self.link = Listener(f"ipc://{folder}/w", boot=new_boot())
        self.boot = new_boot()
        self.poller = Poller()
        self.poller.register(self.link)
        self.inbox: list[tuple[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-P", *program, f"--worker-endpoint={self.link.endpoint}", "--name=w",
             "--threads=1", "--device=cpu", "--beat-s=0.2", *flags],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def stop(self) -> None:
        """Stop the worker's process until SIGCONT; none of its threads runs any more."""
        self.signal(signal.SIGSTOP)
        while not self._is_stopped():
            time.sleep(0.01)

    def _is_stopped(self) -> bool:
        try:
            stats = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/stat")]
        except OSError:
            return False  # A thread has ended since it was listed.
        return all(stat.rsplit(")", 1)[1].split()[0] == "T" for stat in stats)

    def pending(self, signum: signal.Signals) -> bool:
        """Whether a signal waits for the worker's process to run again."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (mask,) = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
        return bool(int(mask, 16) >> (signum - 1) & 1)

    def close(self) -> int:
        """The connection is lost and the worker asked to stop; its exit code."""
        self.link.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()

    def expect(self, kind: type[M], when: Callable[[M], bool] = lambda _: True, seconds: float = 60) -> tuple[str, M]:
        """The next message of this kind and who sent it; others stay in the inbox."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for index, (peer, message) in enumerate(self.inbox):
                if isinstance(message, kind) and when(message):
                    del self.inbox[index]
                    return peer, message
            self._take()
        raise AssertionError(f"no {kind.__name__} within {seconds} s; got {self.inbox}")

    def wait(self, seconds: float) -> int:
        """The exit code of the worker, whose Hellos are answered as long as it runs."""
        end = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            assert time.monotonic() < end, f"it runs after {seconds} s"
            self._take()
        return code

    def _take(self) -> None:
        """Receive what comes within a moment, and answer Hellos, as an engine that is well does."""
        self.poller.poll(0.05)
        while (received := self.link.receive()) is not None:
            self.inbox.append((received.peer, received.message))
            if isinstance(received.message, Hello):
                self.link.send(received.peer, HELLO)

    def begin(self, counter: int, config: WorkerConfig) -> Ready:
        """Init until Ready."""
        epoch = Epoch(self.boot, counter)
        self.expect(Hello)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            self.link.send("w/steps", Init(epoch, config))
            try:
                peer, ready = self.expect(Ready, lambda r: r.epoch == epoch, seconds=0.5)
            except AssertionError:
                continue
            assert peer == "w/steps"
            return ready
        raise AssertionError("never ready")

    def send(self, number: int, counter: int, **parts: Any) -> None:
        assert self.link.send("w/steps", make_step(number, Epoch(self.boot, counter), **parts))

    def start_request(self, counter: int, number: int = 1) -> None:
        self.send(
            number,
            counter,
            new=[slot_init(0, PROMPT)],
            new_tokens=PROMPT,
            prefill=[(0, 0, len(PROMPT))],
            sample=[(0, 0)],
            blocks=[(0, 1), (0, 2), (0, 3)],
        )

    def result(self, number: int, counter: int) -> list[int]:
        peer, result = self.expect(StepResult, lambda r: r.epoch == Epoch(self.boot, counter))
        assert peer == "w/results"
        assert result.number == number
        assert result.compute_s > 0
        return [int(token) for token in result.tokens]
