"""How many replicas one engine process keeps busy: workers that compute nothing, 20 ms a step, 256 requests on each.

    python -m benchmarks.engine_scaling [--replicas 1 2 4 8] [--requests 256] [--step-ms 20] [--seconds 8]

Real engine process, real sockets (ipc), one process for each worker, and a front end in this one, as in
``engine_overhead.py``. N times as many requests are submitted as one replica runs, and the engine spreads them. For
each N: tokens per second, as a share of N times those of one replica and of what the workers could give; CPU time of
the engine per step, and as a share of one core; and the share of the machine's cores that is busy.
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
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine_overhead import MODEL, PROMPT_TOKENS, Tokenizer, cpu_seconds, run_engine, run_worker

BLOCK_SIZE = 16


class Rate(NamedTuple):
    """What was measured in one run."""

    tokens: float
    """Per second."""
    engine: float
    """CPU seconds of the engine per second."""
    machine: float
    """Share of the time of all cores that was not idle, other programs included."""


@contextmanager
def processes(folder: str, num_replicas: int, step_s: float, num_blocks: int) -> Iterator[int]:
    """The engine and its workers; gives the engine's process id."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=run_engine, args=(folder, False), daemon=True)]
    for number in range(num_replicas):
        arguments = (folder, step_s, f"w{number}", num_blocks)
        started.append(context.Process(target=run_worker, args=arguments, daemon=True))
    for process in started:
        process.start()
    try:
        assert started[0].pid is not None
        yield started[0].pid
    finally:
        for process in started:
            process.kill()
            process.join()


def busy_seconds() -> float:
    """Time that all cores together were not idle, since the start of the machine."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, *interrupts = map(int, fields)
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def measure(num_replicas: int, *, requests: int, step_s: float, seconds: float) -> Rate:
    """The steady state, once every request has its first token."""
    max_tokens = min(int(seconds / step_s) + 1500, 8000)
    num_blocks = requests * (PROMPT_TOKENS + max_tokens) // BLOCK_SIZE + 2 * requests
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        (Path(folder) / "model" / "config.json").write_text(json.dumps(MODEL))
        with processes(folder, num_replicas, step_s, num_blocks) as engine:
            tokenizer = Tokenizer(folder)
            tokenizer.wait_ready(num_replicas)
            tokenizer.submit(requests * num_replicas, max_tokens)
            while tokenizer.started < requests * num_replicas:
                tokenizer.receive(0.1)
            begin, tokens, cpu, busy = time.perf_counter(), tokenizer.tokens, cpu_seconds(engine), busy_seconds()
            while (elapsed := time.perf_counter() - begin) < seconds:
                tokenizer.receive(0.1)
            return Rate(
                (tokenizer.tokens - tokens) / elapsed,
                (cpu_seconds(engine) - cpu) / elapsed,
                (busy_seconds() - busy) / elapsed / (os.cpu_count() or 1),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=256, help="on each replica")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    step_s = options.step_ms / 1000
    pace = options.requests / step_s
    print(f"{options.requests} requests on each replica, {options.step_ms:g} ms a step, {os.cpu_count()} cores")
    one = None
    for num_replicas in options.replicas:
        rate = measure(num_replicas, requests=options.requests, step_s=step_s, seconds=options.seconds)
        one = one or rate.tokens / num_replicas
        steps = rate.tokens / options.requests
        each = rate.tokens / num_replicas
        print(
            f"N = {num_replicas}: {rate.tokens:8.0f} tokens/s, {each / one:5.3f} x N x one, {each / pace:5.3f} of the "
            f"workers' pace; engine {1e3 * rate.engine / steps:5.2f} ms/step, {rate.engine:4.0%} of a core; all cores "
            f"{rate.machine:4.0%} busy"
        )


if __name__ == "__main__":
    main()
