"""What the engine loop stops for: planning with long queues, a large pool, a long prompt, a worker that joins.

    python -m benchmarks.engine_latency [--rounds 300] [--out benchmarks/results/engine_latency.json]

The real core in this process, a worker that answers at once, CPU time of this thread. The cases with few and many
blocks are two engines side by side whose steps alternate, so that a slow moment of the machine meets both.

- planning: 256 sequences run and 10,000 wait. ``seats full``: none ends; every step asks 16 blocks. ``moving``: 4 end
  in each step and 4 are admitted. Pools of 40,000 and 1,000,000 blocks, in which every block caches a prefix, so that
  each block that is taken evicts one.
- long prompt: ``submit`` and ``plan`` of a prompt of 100,000 tokens beside 64 sequences that decode. New to the cache,
  cached whole by the request before, and with another prompt of the same beginning being computed. The longest of all
  calls of ``submit``, ``plan`` and ``settle`` until its first token counts.
- host tier: the same with a tier of the prefix cache in 50,000 blocks of host memory, which is full. New; in both
  tiers; in host memory alone; half of it on the device.
- large pool: the longest single call of ``plan`` and ``settle`` while a pool of 1,000,000 blocks fills up with prefixes
  and then evicts as many again; and the time to make the pool, when a worker joins.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from benchmarks.simulated import print_table, write_result
from core_engine.block import Block
from core_engine.block_pool import BlockPool
from core_engine.core import CoreConfig, EngineCore
from core_engine.host_memory import HostMemorySpec
from core_engine.host_pool import HostPool
from core_engine.prefix_hash import block_digest, root_digest
from core_engine.request import Request, Sequence
from core_engine.scheduler import SchedulerConfig
from headrace.simulate.run import quiet_collector
from shared.messages import Epoch, FinishReason, Int32, StepResult
from shared.sampling import SamplingParams

SEATS, WAITING, VOCAB, BLOCK_SIZE = 256, 10_000, 1000, 16
FEW, MANY = 40_000, 1_000_000
HOST = 50_000
LONG = 100_000
TABLE = 32
"""Blocks of a cached prefix."""
BLOCK_BYTES = 2**20
CALLS = ("submit", "plan", "settle")
NOTHING: Int32 = np.empty(0, np.int32)
Result = TypeVar("Result")


class Engine:
    """A core whose worker answers at once; each call is timed."""

    def __init__(
        self,
        num_blocks: int,
        *,
        max_model_len: int = 4096,
        seats: int = SEATS,
        replicas: int = 1,
        num_host_blocks: int = 0,
    ) -> None:
        scheduler = SchedulerConfig(
            max_num_seqs=seats, max_num_batched_tokens=8192, max_prefill_tokens=8192, max_model_len=max_model_len
        )
        host = HostMemorySpec(num_host_blocks, BLOCK_BYTES) if num_host_blocks else None
        config = CoreConfig(
            scheduler=scheduler,
            vocab_size=VOCAB,
            max_num_queued_reqs=10**6,
            short_step_s=0.0,
            kv_offloading_size=1.0 if num_host_blocks else 0.0,
        )
        self.now = 0.0
        self.core = EngineCore(config, clock=lambda: self.now)
        for number in range(replicas):
            self.core.begin_epoch(f"w{number}", Epoch(1, number), num_blocks, host)
        self.replica = self.core.replicas[0]
        self.longest: dict[str, float] = {}
        """CPU seconds of the longest call, by name."""
        self._orders = itertools.count()
        self._rng = np.random.default_rng(0)

    def prompt(self, length: int) -> Int32:
        """[length] ids that no other prompt has."""
        return self._rng.integers(0, VOCAB, length).astype(np.int32)

    def submit(self, prompt: Int32, max_tokens: int) -> Sequence:
        order = next(self._orders)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"r{order}", params, prompt, order, self.now, frozenset())
        [sequence] = self.timed("submit", lambda: self.core.submit(request, {0: NOTHING}))
        return sequence

    def step(self) -> float:
        """Plan on each replica, settle what was planned before; CPU seconds of planning on the first replica."""
        took = 0.0
        for replica in self.core.replicas:
            began = time.thread_time()
            step = self.timed("plan", functools.partial(self.core.plan, replica))
            if replica is self.replica:
                took = time.thread_time() - began
            while len(replica.window) > (1 if step is not None else 0):
                oldest = replica.window[0]
                tokens = np.ones(len(oldest.sampled), np.int32)
                result = StepResult(replica.epoch, oldest.number, tokens, NOTHING, transferred=oldest.number)
                self.timed("settle", functools.partial(self.core.settle, replica, result))
        self.now += 0.01
        return took

    def timed(self, name: str, call: Callable[[], Result]) -> Result:
        began = time.thread_time()
        result = call()
        self.longest[name] = max(self.longest.get(name, 0.0), time.thread_time() - began)
        return result

    def end(self, count: int) -> None:
        """Abort some that run."""
        for sequence in [each for each in self.replica.slots.occupied() if each.exit is None][:count]:
            self.core.end(sequence, FinishReason.ABORT)


def fill_with_prefixes(pool: BlockPool) -> None:
    """Have every free block cache a part of a prefix that nobody holds."""
    for number in range(pool.num_free // TABLE):
        parent, before, table = root_digest(str(number)), None, []
        for index in range(TABLE):
            ids = np.full(BLOCK_SIZE, index, np.int32).tobytes()
            block = pool.take()
            digest = block_digest(parent, ids)
            pool.commit(block, digest, parent, ids, before)
            table.append(block)
            parent, before = digest, block
        pool.release(table)


def fill_tier(pool: HostPool) -> None:
    """Have every block keep one that nobody asks for."""
    for number in range(pool.num_blocks):
        block = Block(0)
        block.digest = block_digest(root_digest(), number.to_bytes(4, "little"))
        host = pool.take(block)
        assert host is not None
        host.is_ready = True
        pool.release(host)


def microseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "median_us": 1e6 * float(np.median(seconds)),
        "p90_us": 1e6 * float(np.quantile(seconds, 0.9)),
        "longest_us": 1e6 * max(seconds),
    }


def planning(rounds: int) -> list[dict[str, Any]]:
    """Both pools, seats full and moving."""
    engines = {num_blocks: Engine(num_blocks) for num_blocks in (FEW, MANY)}
    for engine in engines.values():
        fill_with_prefixes(engine.replica.kv.pool)
        for count in (SEATS, WAITING):
            for _ in range(count):
                engine.submit(engine.prompt(96), 3500)
            for _ in range(20):
                engine.step()
    found = []
    with quiet_collector():
        for case, ending in (("seats full", 0), ("moving", 4)):
            took: dict[int, list[float]] = {num_blocks: [] for num_blocks in engines}
            for _ in range(rounds):
                for num_blocks, engine in engines.items():
                    if ending:
                        engine.end(ending)
                        for _ in range(ending):
                            engine.submit(engine.prompt(96), 3500)
                    took[num_blocks].append(engine.step())
            for num_blocks, engine in engines.items():
                row = {"case": case, "num_blocks": num_blocks, **microseconds(took[num_blocks])}
                row |= {"running": engine.replica.num_running, "waiting": len(engine.core.waiting)}
                found.append(row)
    return found


def long_prompt(rounds: int) -> list[dict[str, Any]]:
    """The longest calls until a prompt of 100,000 tokens has its first token."""
    found = []
    for num_blocks, replicas in ((FEW, 1), (MANY, 1), (FEW, 2)):
        engine = Engine(num_blocks, max_model_len=LONG + 2048, seats=80, replicas=replicas)
        for replica in engine.core.replicas:
            fill_with_prefixes(replica.kv.pool)
        for _ in range(64):
            engine.submit(engine.prompt(64), 100_000)
        for _ in range(8):
            engine.step()
        calls: dict[str, list[dict[str, float]]] = {"new": [], "cached": [], "begins like another": []}
        with quiet_collector():
            for _ in range(rounds):
                prompt = engine.prompt(LONG)
                calls["new"].append(until_first_token(engine, prompt))
                calls["cached"].append(until_first_token(engine, prompt))
                first = engine.submit(engine.prompt(LONG), 4)
                engine.step()
                alike = np.concatenate([first.request.prompt[: LONG // 2], engine.prompt(LONG // 2)])
                calls["begins like another"].append(until_first_token(engine, alike))
                engine.core.end(first, FinishReason.ABORT)
        found += rows_of(calls, num_blocks=num_blocks, replicas=replicas)
    return found


def rows_of(calls: dict[str, list[dict[str, float]]], **fields: int) -> list[dict[str, Any]]:
    """One for each case; ``calls`` are those of ``until_first_token``."""
    found = []
    for case, longest in calls.items():
        row: dict[str, Any] = {"case": case, **fields}
        for name in CALLS:
            row[f"{name}_ms"] = 1e3 * float(np.median([each[name] for each in longest]))
            row[f"{name}_most_ms"] = 1e3 * max(each[name] for each in longest)
        found.append(row)
    return found


def until_first_token(engine: Engine, prompt: Int32) -> dict[str, float]:
    """CPU seconds of the longest calls meanwhile, by name."""
    engine.longest = {}
    sequence = engine.submit(prompt, 4)
    while sequence.finish_reason is None:
        engine.step()
    for _ in range(4):
        engine.step()
    return engine.longest


def host_tier(rounds: int) -> list[dict[str, Any]]:
    """The same where host memory, full of other prefixes, keeps what is released. Copies take no time, so that all that
    is found is loaded."""
    found = []
    for replicas in (1, 2):
        engine = Engine(FEW, max_model_len=LONG + 2048, seats=80, replicas=replicas, num_host_blocks=HOST)
        pools = [replica.kv.pool for replica in engine.core.replicas]
        for replica in engine.core.replicas:
            fill_with_prefixes(replica.kv.pool)
            assert replica.kv.host is not None
            fill_tier(replica.kv.host.pool)
        for _ in range(64):
            engine.submit(engine.prompt(64), 100_000)
        for _ in range(8):
            engine.step()
        calls: dict[str, list[dict[str, float]]] = {"new": [], "in both": [], "in host memory": [], "half of it": []}
        with quiet_collector():
            for _ in range(rounds):
                prompt = engine.prompt(LONG)
                for case, seen in calls.items():
                    if case in ("in host memory", "half of it"):
                        for pool in pools:
                            fill_with_prefixes(pool)
                    if case == "half of it":
                        until_first_token(engine, prompt[: LONG // 2])
                    seen.append(until_first_token(engine, prompt))
        found += rows_of(calls, num_blocks=FEW, replicas=replicas)
    return found


def large_pool() -> dict[str, Any]:
    """Requests of 2,000 new tokens, 32 at a time, until each block was used twice."""
    began = time.thread_time()
    engine = Engine(MANY, seats=32)
    made_s = time.thread_time() - began
    prompts = (2 * MANY * BLOCK_SIZE) // 2000
    took: list[float] = []
    with quiet_collector():
        engine.longest = {}
        for number in range(prompts):
            if number == prompts // 2:
                filling, engine.longest = engine.longest, {}
            engine.submit(engine.prompt(2000), 1)
            while len(engine.core.waiting) >= 32:
                took.append(engine.step())
    return {
        "num_blocks": MANY,
        "made_ms": 1e3 * made_s,
        "filling_longest_ms": {name: 1e3 * seconds for name, seconds in filling.items()},
        "evicting_longest_ms": {name: 1e3 * seconds for name, seconds in engine.longest.items()},
        **microseconds(took),
    }


def print_longest(title: str, rows: list[dict[str, Any]]) -> None:
    """Those of ``rows_of``."""
    head = [title, "blocks", "replicas", *(f"longest {name}: median, most, ms" for name in CALLS)]
    table = [
        [row["case"], f"{row['num_blocks']:,}", row["replicas"]]
        + [f"{row[f'{name}_ms']:.1f}, {row[f'{name}_most_ms']:.1f}" for name in CALLS]
        for row in rows
    ]
    print_table(head, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="steps of each planning case")
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()
    plans = planning(options.rounds)
    head = ["planning", "blocks", "median, µs", "p90, µs"]
    print_table(head, [[row["case"], f"{row['num_blocks']:,}", row["median_us"], row["p90_us"]] for row in plans])
    prompts = long_prompt(max(options.rounds // 50, 2))
    print_longest("prompt of 100,000", prompts)
    tier = host_tier(max(options.rounds // 30, 2))
    print_longest("with a host tier", tier)
    pool = large_pool()
    head = ["pool of 1,000,000 blocks", "longest plan, ms", "longest settle, ms"]
    rows = [
        [name, pool[f"{name}_longest_ms"]["plan"], pool[f"{name}_longest_ms"]["settle"]]
        for name in ("filling", "evicting")
    ]
    print_table(head, rows)
    print(f"making it took {pool['made_ms']:.1f} ms")
    write_result(options.out, {"planning": plans, "long_prompt": prompts, "host_tier": tier, "large_pool": pool})


if __name__ == "__main__":
    main()
