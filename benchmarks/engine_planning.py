"""What planning a step costs under each scheduling policy.

    python -m benchmarks.engine_planning [--policy fcfs ...] [--num-blocks 40000] [--repeat 5] [--json FILE]

256 sequences decode and 10,000 wait, of 50 tenants and 3 priorities, every second one with a prefix that others have.
The first 256 have a lower priority, but came so long before that nobody takes their places.
``full``: every seat is taken. ``moving``: 4 sequences end in each step, so that others are admitted. ``arriving``: in
each step a request comes whose priority is higher than all others'; where that counts one of the lowest gives way to
it. Prints a JSON line for each policy, with the median and the 90th percentile of ``plan`` in microseconds of the
thread's CPU time, each the lowest of several repetitions: planning never waits, and what else the machine does should
not count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import pathlib
import time
from typing import Any

import numpy as np

from core_engine.core import CoreConfig, EngineCore
from core_engine.queues import QUEUES
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from shared.messages import Epoch, FinishReason, StepResult
from shared.sampling import SamplingParams

SEATS, WAITING, TENANTS, VOCAB = 256, 10_000, 50, 1000
NOTHING = np.empty(0, np.int32)
SCENES = {"full": (0, 0), "moving": (4, 0), "arriving": (0, 1)}
"""Sequences that end, and that come with a higher priority, in each step."""


class Load:
    """An engine whose worker answers at once."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        scheduler = SchedulerConfig(
            max_num_seqs=SEATS, max_num_batched_tokens=8192, max_prefill_tokens=8192, max_model_len=2048
        )
        config = CoreConfig(
            scheduler=scheduler, vocab_size=VOCAB, policy=policy, max_num_queued_reqs=10**6, short_step_s=0.0
        )
        self.now = 0.0
        self.core = EngineCore(config, clock=lambda: self.now)
        self.core.begin_epoch("w0", Epoch(1, 1), num_blocks)
        self.replica = self.core.replicas[0]
        self._orders = itertools.count()
        self._rng = np.random.default_rng(0)
        self._shared = self._rng.integers(0, VOCAB, (20, 64)).astype(np.int32)

    def submit(self, count: int, priority: int | None = None) -> None:
        for order in itertools.islice(self._orders, count):
            prompt = self._rng.integers(0, VOCAB, 96).astype(np.int32)
            if order % 2:
                prompt[:64] = self._shared[order // 2 % 20]
            request = Request(
                f"r{order}",
                SamplingParams(max_tokens=1500, ignore_eos=True),
                prompt,
                order,
                self.now + 1e-6 * order,
                frozenset(),
                tenant=f"t{order % TENANTS}",
                priority=order % 3 if priority is None else priority,
            )
            self.core.submit(request, {0: NOTHING})

    def step(self) -> float:
        """Returns the seconds that planning took."""
        began = time.thread_time()
        step = self.core.plan(self.replica)
        took = time.thread_time() - began
        while len(self.replica.window) > (1 if step is not None else 0):
            self._settle()
        self.now += 0.01
        return took

    def _settle(self) -> None:
        step = self.replica.window[0]
        tokens = np.ones(len(step.sampled), np.int32)
        self.core.settle(self.replica, StepResult(self.replica.epoch, step.number, tokens, NOTHING))

    def end_some(self, count: int) -> None:
        running = [each for each in self.replica.slots.occupied() if each.exit is None]
        for sequence in running[:count]:
            self.core.end(sequence, FinishReason.ABORT)
        self.submit(count)


def measure(policy: str, num_blocks: int, steps: int, repeat: int) -> dict[str, object]:
    found = [measure_once(policy, num_blocks, steps) for _ in range(repeat)]
    scenes = {
        name: {figure: min(each[name][figure] for each in found) for figure in ("median_us", "p90_us")}
        for name in SCENES
    }
    return {**found[0], **scenes}


def measure_once(policy: str, num_blocks: int, steps: int) -> dict[str, Any]:
    load = Load(policy, num_blocks)
    load.submit(SEATS, priority=5)
    for _ in range(20):
        load.step()
    load.now += 1000.0
    load.submit(WAITING)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    figures: dict[str, Any] = {"policy": policy, "num_blocks": num_blocks}
    for name, (ending, arriving) in SCENES.items():
        took = []
        for number in range(steps):
            if ending:
                load.end_some(ending)
            if arriving:
                load.submit(arriving, priority=-1 - number)
            took.append(1e6 * load.step())
        figures[name] = {"median_us": round(float(np.median(took))), "p90_us": round(float(np.quantile(took, 0.9)))}
    figures["preempted"] = int(load.core.metrics.preemptions.value)
    figures["running"], figures["waiting"] = load.replica.num_running, len(load.core.waiting)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="*", default=list(QUEUES), choices=list(QUEUES))
    parser.add_argument("--num-blocks", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures of all policies to this file")
    args = parser.parse_args()
    found = []
    for policy in args.policy:
        found.append(measure(policy, args.num_blocks, args.steps, args.repeat))
        print(json.dumps(found[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
