"""How much of the KV cache's memory holds tokens, and how many requests it takes.

    python -m benchmarks.kv_memory [--out benchmarks/results/kv_memory.json]

The real scheduler and block manager on a simulated clock, 20 ms a step, blocks of 16 tokens; the result does not depend
on the machine. ``mix`` is 1,000 requests with lognormal lengths, all there at the start; each client asks for as many
tokens as it gets, or for 1,024 whatever it gets (``lengths unknown``).

- unused slots: of the blocks that sequences hold, the share of token slots in which no KV is written or on its way, by
  time, while requests wait. In use, at the first preemption: the share of the whole pool's slots that hold KV when the
  last step before it was planned, and the share of blocks that are held.
- requests at once: how many run, by time, while others wait, in the memory that 4 reservations of the longest possible
  request would take.
- shared prompt: blocks that 32 requests hold with one system prompt of 512 tokens and 64 tokens of their own each.
- n = 8: the most blocks that one request with 8 choices holds, and 8 separate ones, of 512 tokens in and 64 out.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from benchmarks.simulated import BLOCK_SIZE, CONSTANT, LONGEST, blocks_for, core_config, mix, print_table, write_result
from core_engine.core import CoreConfig
from headrace.simulate.run import Outcome, Simulator
from headrace.simulate.trace import TraceRequest

RESERVATIONS = 4
SMALL_POOLS = (RESERVATIONS * LONGEST // BLOCK_SIZE, 1500, 4000)
"""Usable blocks. The second and third hold some 50 and 160 requests of ``mix``."""
ASKED = 1024
SYSTEM, OWN = 512, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """What the pool's memory was used for. Means are by time, while requests waited."""

    held: float
    """Share of the blocks."""
    unused: float
    """Share of the slots of held blocks."""
    running: float
    held_before_preemption: float | None
    """Share of the blocks, as planned last before the first preemption; None: there was none."""
    written_before_preemption: float | None
    """Share of the slots of the whole pool."""
    preemptions: int


class Watched(Simulator):
    """A simulation that keeps, for each moment, how many token slots are held and how many are written."""

    def __init__(self, config: CoreConfig, trace: list[TraceRequest], num_blocks: int) -> None:
        super().__init__(config, CONSTANT, trace, num_blocks=num_blocks)
        self._moments: list[tuple[float, int, int, int, int, float]] = []

    def _note(self) -> None:
        super()._note()
        [replica] = self._replicas
        slots = replica.slots
        written = int(np.minimum(slots.num_computed, slots.capacity).sum())
        held = int(slots.capacity.sum())
        waiting, preempted = len(self._core.waiting), self._core.metrics.preemptions.value
        self._moments.append((self.now, held, written, replica.num_running, waiting, preempted))

    def use(self, outcome: Outcome) -> Use:
        time, held, written, running, waiting, preempted = np.array(self._moments).T
        capacity = outcome.num_blocks * BLOCK_SIZE
        spans = np.append(np.diff(time), 0.0)
        spans[np.flatnonzero(waiting)[-1] + 1 :] = 0.0
        hit = np.flatnonzero(preempted)
        before = hit[0] - 1 if len(hit) else None
        return Use(
            held=float((held * spans).sum() / spans.sum() / capacity),
            unused=1.0 - float((written * spans).sum() / (held * spans).sum()),
            running=float((running * spans).sum() / spans.sum()),
            held_before_preemption=None if before is None else float(held[before] / capacity),
            written_before_preemption=None if before is None else float(written[before] / capacity),
            preemptions=outcome.preemptions,
        )


def use_of_mix(num_blocks: int, max_tokens: int | None, count: int = 1000) -> Use:
    """``num_blocks``: usable ones. No two requests share anything, so that slots held are blocks held."""
    simulation = Watched(core_config(), mix(count, max_tokens), num_blocks + 1)
    return simulation.use(simulation.run())


def most_held(trace: list[TraceRequest]) -> int:
    """Most blocks that the requests of a trace hold at once."""
    simulator = Simulator(core_config(), CONSTANT, trace, num_blocks=10_001)
    return int(simulator.run().timeline.table()["used_blocks"].max())


def shared_prompt(count: int = 32) -> int:
    """Blocks that ``count`` requests hold that begin with one system prompt, all there at the start; they get 2 tokens
    in their last block, so that they run together once each has its prompt."""
    request = TraceRequest(arrival_s=0.0, prompt=SYSTEM + OWN - 8, output=8, prefix=(("system", SYSTEM),))
    return most_held([dataclasses.replace(request) for _ in range(count)])


def choices(n: int = 8) -> tuple[int, int]:
    """Most blocks that one request with ``n`` choices holds, and ``n`` requests."""
    request = TraceRequest(arrival_s=0.0, prompt=512, output=64)
    return most_held([dataclasses.replace(request, n=n)]), most_held([dataclasses.replace(request) for _ in range(n)])


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()
    result: dict[str, Any] = {"mix": []}
    rows = []
    for max_tokens in (None, ASKED):
        for num_blocks in SMALL_POOLS:
            use = use_of_mix(num_blocks, max_tokens)
            lengths = "known" if max_tokens is None else "unknown"
            result["mix"].append({"lengths": lengths, "num_blocks": num_blocks} | dataclasses.asdict(use))
            before = [_percent(use.held_before_preemption), _percent(use.written_before_preemption)]
            row = [lengths, f"{num_blocks:,}", f"{use.running:.1f}", _percent(use.held), _percent(use.unused)]
            rows.append([*row, *before, use.preemptions])
    head = ["lengths", "blocks", "run at once", "blocks held", "unused slots of them", "held at the first preemption"]
    print_table([*head, "slots written then", "preemptions"], rows)
    held, whole = shared_prompt(), blocks_for(SYSTEM)
    own = 32 * blocks_for(OWN)
    one, separate = choices()
    result["shared_prompt"] = {"requests": 32, "held": held, "system_prompt": whole, "own": own}
    result["choices"] = {"n": 8, "held": one, "separate": separate, "share": one / separate}
    print(f"\n32 requests with one system prompt hold {held} blocks: {whole} of it, once, and {held - whole} others")
    print(f"n = 8 holds {one} blocks, 8 separate requests {separate}: {one / separate:.2f} x")
    write_result(options.out, result)


if __name__ == "__main__":
    main()
