"""A real engine in a thread, with a simulated worker and a front end on real sockets."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from waiting import wait_until

from core_engine.engine import Engine
from shared.config import Settings
from shared.errors import StartupError
from shared.hop import Growth, Parent, RunningClock, Timers
from shared.hop import Request as HopRequest
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Attempt,
    Dismissed,
    Hello,
    Init,
    Load,
    Message,
    Ready,
    Step,
    TokenSpec,
    WorkerFailed,
)
from shared.sampling import SamplingParams
from shared.transport import Connector, new_boot
from tests.core_engine.simulation import EOS_IDS, VOCAB, SimulatedWorker

BEAT_S = 0.2
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": list(EOS_IDS),
    "torch_dtype": "bfloat16",
}


def hello(role: str, name: str = "test") -> Hello:
    return Hello(role, name, OLDEST_PROTOCOL, PROTOCOL_VERSION, True, None)


until = functools.partial(wait_until, every_s=0.002)


class RunningEngine:
    """An ``Engine`` on ipc sockets below ``folder``; ``with`` it runs in a thread."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        self.front = f"ipc://{folder}/f"
        self.workers = f"ipc://{folder}/w"
        defaults: dict[str, Any] = {
            "model": str(model),
            "listen": self.front,
            "listen_workers": self.workers,
            "device": "cpu",
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "beat_s": BEAT_S,
            "batch_invariant": True,
            "name": "engine-under-test",
        }
        self.engine = Engine(Settings(**(defaults | settings)))
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.join()

    def join(self) -> None:
        self.engine.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.engine.run()
        except StartupError as error:
            self.error = error


class WorkerThread:
    """A ``SimulatedWorker`` behind two connectors. ``deaf``: it reads steps and answers none."""

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "w0",
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        error: str | None = None,
    ) -> None:
        boot = new_boot()
        self.num_host_blocks = num_host_blocks
        self.steps = Connector(endpoint, identity=f"{name}/steps", boot=boot)
        self.results = Connector(endpoint, identity=f"{name}/results", boot=boot)
        self.num_blocks = num_blocks
        self.error = error
        self.deaf = False
        self.leaving = self.dismissed = False
        self.failures = 0
        """Steps in which it will fail."""
        self.deadly = ""
        """A request that it fails of whenever it gets it."""
        self.errands: deque[Callable[[], Any]] = deque()
        """What the thread that owns the sockets is to do."""
        self.executed: list[Step] = []
        self.epochs: list[Any] = []
        self.broken: BaseException | None = None
        self._name = name
        self._worker: SimulatedWorker | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> WorkerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.broken is None, self.broken

    def leave(self) -> None:
        """Say that it was asked to stop."""
        self.leaving = True
        self.errands.append(lambda: self.steps.send(self._hello()))

    def _hello(self) -> Hello:
        return dataclasses.replace(hello("gpu_worker", self._name), leaving=self.leaving)

    def kill(self) -> None:
        """Close the sockets, as the end of a process does."""
        self._stop.set()
        self._thread.join()
        self.steps.close()
        self.results.close()

    def _run(self) -> None:
        beat = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now - beat > BEAT_S and self.steps.send(self._hello()):
                self.results.send(hello("gpu_worker", self._name))
                beat = now
            while self.errands:
                self.errands.popleft()()
            received = self.steps.receive()
            if received is None:
                time.sleep(0.001)
                continue
            try:
                self._on_message(received.message)
            except AssertionError as error:
                self.broken = error
                return

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Init):
            if message.epoch not in self.epochs:
                self.epochs.append(message.epoch)
                config = message.config
                sizes = self.num_blocks, config.block_size, config.num_slots
                self._worker = SimulatedWorker(*sizes, num_host_blocks=self.num_host_blocks)
            ready = Ready(message.epoch, self.num_blocks, 4096, "cpu", "bfloat16", self.error, self.num_host_blocks)
            self.steps.send(ready)
        elif isinstance(message, Dismissed):
            self.dismissed = self.dismissed or [message.epoch] == self.epochs[-1:]
        elif isinstance(message, Step) and [message.epoch] == self.epochs[-1:] and not self.deaf:
            if self._worker is None:
                return
            if self.failures or any(init.rid == self.deadly for init in message.new):
                self.failures, self._worker = max(self.failures - 1, 0), None
                self.steps.send(WorkerFailed(message.epoch, message.number, "device lost"))
                return
            self.executed.append(message)
            self._worker.transfers.receive(message)
            self.results.send(self._worker.execute(message))


class FrontEnd:
    """A tokenizer's lower side."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.boot = new_boot()
        self.link = Connector(endpoint, identity=f"tokenizer/{self.boot:x}", boot=self.boot)
        clock = RunningClock(time.monotonic)
        self.parent = Parent(
            send=lambda child, message: self.link.send(message),
            clock=clock,
            timers=Timers(BEAT_S),
            events=self,
            children=[endpoint],
        )
        self.hello: Hello | None = None
        self.load: Load | None = None
        self.all: dict[str, HopRequest] = {}
        self.accepted_ids: set[str] = set()
        self.superseded_ids: set[str] = set()
        self._beat = 0.0

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def submit(
        self,
        prompt: list[int],
        rid: str | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        **params: Any,
    ) -> HopRequest:
        sampling = SamplingParams(**({"max_tokens": 16} | params))
        spec = TokenSpec(sampling, np.array(prompt, np.int32).tobytes(), priority, deadline_s=deadline_s)
        request = HopRequest(rid or f"r{len(self.all)}", spec)
        self.all[request.rid] = request
        self.parent.place(request, spec, Attempt(1, self.boot, 0))
        return request

    def submit_with_rows(self, rid: str, spec: TokenSpec, rows: dict[int, list[int]]) -> HopRequest:
        """As a tokenizer that has rows of some choices already, from an engine or a tokenizer that is gone."""
        request = self.all[rid] = HopRequest(rid, spec)
        for choice, ids in rows.items():
            request.logs[choice].grow(ids, [])
        self.parent.place(request, spec, Attempt(2, self.boot, 0))
        return request

    def turn(self) -> None:
        now = time.monotonic()
        if now - self._beat > BEAT_S and self.link.send(hello("tokenizer_service")):
            self._beat = now
        while (received := self.link.receive()) is not None:
            if isinstance(received.message, Hello):
                self.hello = received.message
            elif isinstance(received.message, Load):
                self.load = received.message
            else:
                self.parent.receive(self.endpoint, received.boot, received.message)
        self.parent.flush()
        self.parent.tick()

    def wait(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        until(condition, seconds, meanwhile=self.turn)

    def wait_ready(self) -> None:
        self.wait(lambda: self.hello is not None and self.hello.ready)

    def wait_over(self) -> None:
        self.wait(lambda: all(request.over for request in self.all.values()))

    def metric(self, name: str, **labels: str) -> float | None:
        if self.load is None:
            return None
        return next((v for n, found, v in self.load.metrics if n == name and labels.items() <= found.items()), None)

    # -- events of the parent --------------------------------------------------------------------------------------

    def accepted(self, request: HopRequest) -> None:
        self.accepted_ids.add(request.rid)

    def grew(self, growths: Sequence[Growth]) -> None:
        pass

    def superseded(self, request: HopRequest, live: Attempt) -> None:
        self.superseded_ids.add(request.rid)


@contextmanager
def two_front_ends(running: RunningEngine) -> Iterator[tuple[Engine, WorkerThread, FrontEnd, FrontEnd]]:
    """An engine with a worker, a tokenizer whose requests another one takes over, and that other one, all ready."""
    with (
        running as engine,
        WorkerThread(running.workers) as worker,
        FrontEnd(running.front) as gone,
        FrontEnd(running.front) as front,
    ):
        gone.wait_ready()
        front.wait_ready()
        yield engine, worker, gone, front
