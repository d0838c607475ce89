"""What a step costs the engine: CPU time and rate with a worker that computes nothing.

    python benchmarks/engine_overhead.py [--requests 256] [--steps 2000]

Real engine process, real sockets (ipc). A fake worker process answers every step at once, or after a fixed time. A fake
tokenizer submits all requests, acknowledges once a beat, and counts the tokens that arrive. Three runs:

- a worker that answers at once: CPU time of the engine process per step,
- a worker that takes 5 ms a step: the same with cold caches,
- a worker that takes 10 ms a step, and planning slowed to 8 ms: steps per second show whether the two overlap.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from core_engine.engine import Engine
from core_engine.replica import Replica
from shared.config import Settings
from shared.hop import digest
from shared.logging import setup_logging
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Ack,
    AckEntry,
    Attempt,
    Hello,
    Init,
    Known,
    Load,
    Ready,
    Step,
    StepResult,
    Submit,
    TokenDelta,
    TokenSpec,
)
from shared.sampling import SamplingParams
from shared.transport import Connector, Poller, new_boot

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPT_TOKENS = 64
NUM_BLOCKS = 140_000
"""Enough for all requests at their longest: nothing is preempted."""
NO_INTS = np.empty(0, np.int32)


class SlowEngine(Engine):
    """Plans for 8 ms longer."""

    def plan(self, replica: Replica) -> Step | None:
        if len(replica.window) < self.config.core.steps_in_flight:
            time.sleep(0.008)
        return super().plan(replica)


def run_engine(folder: str, slow: bool) -> None:
    setup_logging("core_engine", "warning")
    settings = Settings(
        model=f"{folder}/model", listen=f"ipc://{folder}/front", listen_workers=f"ipc://{folder}/worker", device="cpu",
        name="bench",
    )  # fmt: skip
    (SlowEngine if slow else Engine)(settings).run()


def hello(role: str) -> Hello:
    return Hello(role, "bench", OLDEST_PROTOCOL, PROTOCOL_VERSION, True, None)


def run_worker(folder: str, step_s: float, name: str = "w", num_blocks: int = NUM_BLOCKS) -> None:
    """Answer each step after ``step_s`` seconds of its own time, one after another."""
    boot = new_boot()
    steps = Connector(f"ipc://{folder}/worker", identity=f"{name}/steps", boot=boot)
    results = Connector(f"ipc://{folder}/worker", identity=f"{name}/results", boot=boot)
    poller = Poller()
    poller.register(steps)
    while not (steps.send(hello("gpu_worker")) and results.send(hello("gpu_worker"))):
        time.sleep(0.01)
    beat, free_at = time.monotonic(), 0.0
    while True:
        waited = bool(poller.poll(0.0)) or not poller.poll(1.0)
        while (received := steps.receive()) is not None:
            message = received.message
            if isinstance(message, Init):
                steps.send(Ready(message.epoch, num_blocks, 16 * 1024, "cpu", "bfloat16"))
            elif isinstance(message, Step):
                if step_s:
                    # A step that waited here begins when the one before ended, whatever this timer's slack.
                    now = time.monotonic()
                    free_at = (max(free_at, now - step_s) if waited else now) + step_s
                    time.sleep(max(0.0, free_at - time.monotonic()))
                tokens = np.full(len(message.sample), 1000 + message.number % 1000, np.int32)
                results.send(StepResult(message.epoch, message.number, tokens, NO_INTS, compute_s=step_s))
                waited = True
        if time.monotonic() - beat > 1.0:
            beat = time.monotonic()
            steps.send(hello("gpu_worker"))


@contextmanager
def processes(folder: str, step_s: float, slow: bool) -> Iterator[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    engine = context.Process(target=run_engine, args=(folder, slow), daemon=True)
    worker = context.Process(target=run_worker, args=(folder, step_s), daemon=True)
    engine.start()
    worker.start()
    try:
        yield engine
    finally:
        for process in (engine, worker):
            process.kill()
            process.join()


class Tokenizer:
    """Submits requests and counts the tokens that come back."""

    def __init__(self, folder: str) -> None:
        self.link = Connector(f"ipc://{folder}/front", identity="tokenizer/bench", boot=new_boot())
        self.poller = Poller()
        self.poller.register(self.link)
        self.have: dict[int, int] = {}
        self.deltas = self.tokens = self.started = 0
        self.beat = 0.0

    def wait_ready(self, num_replicas: int = 1) -> None:
        """Until so many workers are ready."""
        while True:
            self.link.send(hello("tokenizer_service"))
            self.poller.poll(0.05)
            while (received := self.link.receive()) is not None:
                if isinstance(received.message, Load):
                    names = [name for name, _, _ in received.message.metrics]
                    if names.count("headrace:replica_requests_running") == num_replicas:
                        return

    def submit(self, count: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        for handle in range(count):
            prompt = np.arange(handle, handle + PROMPT_TOKENS, dtype=np.int32)
            spec = TokenSpec(params, prompt.tobytes())
            known = [Known(0, digest(()))]
            submit = Submit(f"r{handle}", Attempt(1, 1, 0), handle, spec, np.zeros(1, np.int32), NO_INTS, [None], known)
            self.have[handle] = 0
            while not self.link.send(submit):
                self.receive(0.01)

    def receive(self, seconds: float) -> None:
        self.poller.poll(seconds)
        while (received := self.link.receive()) is not None:
            if isinstance(received.message, TokenDelta):
                rows = received.message.rows
                self.deltas += 1
                self.tokens += int(rows[:, 3].sum())
                self.started += int((rows[:, 2] == 0).sum())
                for handle, _, start, count in rows[:1].tolist():
                    self.have[handle] = start + count
        if time.monotonic() - self.beat > 1.0:
            self.beat = time.monotonic()
            low = min(self.have.values())
            entries = [AckEntry(f"r{handle}", Attempt(1, 1, 0), handle, [low], beat=True) for handle in self.have]
            self.link.send(Ack(entries))


def cpu_seconds(pid: int) -> float:
    """CPU time of every thread of a process."""
    return sum(int(path.read_text().split()[0]) / 1e9 for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def measure(name: str, *, requests: int, steps: int, step_s: float, slow: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        (Path(folder) / "model" / "config.json").write_text(json.dumps(MODEL))
        with processes(folder, step_s, slow) as engine:
            tokenizer = Tokenizer(folder)
            tokenizer.wait_ready()
            tokenizer.submit(requests, max_tokens=min(steps + 400, 8000))
            while tokenizer.have[requests - 1 if requests else 0] == 0 and tokenizer.have[0] < 100:
                tokenizer.receive(0.1)
            assert engine.pid is not None
            begin, cpu, first = time.perf_counter(), cpu_seconds(engine.pid), tokenizer.have[0]
            while tokenizer.have[0] - first < steps:
                tokenizer.receive(0.1)
            done = tokenizer.have[0] - first
            elapsed, cpu = time.perf_counter() - begin, cpu_seconds(engine.pid) - cpu
    print(f"{name:44s} {1e3 * cpu / done:7.3f} ms CPU/step {done / elapsed:9.1f} steps/s {tokenizer.deltas:7d} deltas")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{options.requests} running requests, one decode row each")
    measure("worker answers at once", requests=options.requests, steps=options.steps, step_s=0.0)
    measure("worker takes 5 ms", requests=options.requests, steps=options.steps // 4, step_s=0.005)
    measure("worker takes 10 ms, planning 8 ms", requests=options.requests, steps=300, step_s=0.010, slow=True)


if __name__ == "__main__":
    main()
