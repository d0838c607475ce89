"""Continuous against static batching of the same engine: throughput, and what short requests wait for long ones.

    python -m benchmarks.static_batching [--seats 16 32 64 128] [--out benchmarks/results/static_batching.json]

The real scheduler on a simulated clock, 20 ms a step whatever it computes, memory for all; the result does not depend
on the machine. Static: a batch of at most as many requests as there are seats is admitted, and nothing more until all
of it has ended. It begins as soon as the one before has ended, with those who wait, however few. A request is over with
its last token, not with its batch.

- mix: 1,000 requests, lognormal lengths, all there at the start. Output tokens/s.
- short and long: 80 % of 1,000 requests want 50 tokens and 20 % want 500, of 100 in, 32 seats. Latency of the short
  ones, from arrival to the last token, at shares of the load that static batching bears at most; ``all at once``: they
  are all there at the start, and nearly all of the latency is the queue, which is as long as the whole load.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from benchmarks.simulated import CONSTANT, core_config, mix, print_table, write_result
from headrace.bench.load import arrival_times
from headrace.simulate.run import Outcome, Simulator
from headrace.simulate.trace import TraceRequest

NUM_BLOCKS = 100_000
COUNT, SHORT, LONG, SHORT_SHARE, INPUT = 1000, 50, 500, 0.8, 100
LATENCY_SEATS = 32
LOADS = (0.5, 0.7, 0.9)


class Continuous(Simulator):
    """The engine as it is, with ``seats`` seats."""

    def __init__(self, trace: list[TraceRequest], seats: int) -> None:
        super().__init__(core_config(max_num_seqs=seats), CONSTANT, trace, num_blocks=NUM_BLOCKS)
        self._seats = seats


class Static(Continuous):
    """Requests reach the engine in batches of at most ``seats``, each when the one before has ended."""

    _began = 0.0
    _taken = 0
    """Requests of the present batch."""

    def _coming(self) -> float:
        arrival = super()._coming()
        if self._live and (self._taken == self._seats or arrival > self._began or self.now > self._began):
            return math.inf
        return arrival

    def _submit(self) -> None:
        if not self._live:
            self._began, self._taken = self.now, 0
        self._taken += 1
        super()._submit()


MODES: dict[str, type[Continuous]] = {"continuous": Continuous, "static": Static}


def output_rate(outcome: Outcome) -> float:
    """Output tokens/s of a load that is there at the start."""
    return float(outcome.output.sum() / outcome.ended.max())


def short_and_long(rate: float, count: int) -> list[TraceRequest]:
    """At ``rate`` requests/s (infinity: all at once), in random order."""
    is_short = np.random.default_rng(0).permutation(count) < SHORT_SHARE * count
    arrivals = arrival_times(count, rate, 1.0, 0)
    return [
        TraceRequest(arrival_s=arrival, prompt=INPUT, output=SHORT if short else LONG)
        for arrival, short in zip(arrivals, is_short.tolist(), strict=True)
    ]


def short_latency(trace: list[TraceRequest], outcome: Outcome) -> float:
    """P95 from arrival to the last token of the short requests, in seconds."""
    arrivals = np.array([request.arrival_s for request in trace])
    is_short = np.array([request.output == SHORT for request in trace])
    return float(np.percentile((outcome.ended - arrivals)[is_short], 95))


def compare_throughput(seats: int) -> dict[str, Any]:
    rates = {mode: output_rate(simulator(mix(), seats).run()) for mode, simulator in MODES.items()}
    return {"seats": seats, **rates, "ratio": rates["continuous"] / rates["static"]}


def static_capacity(count: int = COUNT) -> float:
    """Requests/s of short and long ones that static batching bears."""
    return count / float(Static(short_and_long(math.inf, count), LATENCY_SEATS).run().ended.max())


def compare_latency(load: float, capacity: float, count: int = COUNT) -> dict[str, Any]:
    """``load``: share of ``capacity``; infinity: all at once."""
    trace = short_and_long(load * capacity, count)
    seconds = {mode: short_latency(trace, simulator(trace, LATENCY_SEATS).run()) for mode, simulator in MODES.items()}
    return {"load": load, **seconds, "ratio": seconds["continuous"] / seconds["static"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()
    throughput = [compare_throughput(seats) for seats in options.seats]
    print_table(
        ["mix, seats", "continuous, tokens/s", "static, tokens/s", "ratio"],
        [[row["seats"], f"{row['continuous']:,.0f}", f"{row['static']:,.0f}", row["ratio"]] for row in throughput],
    )
    capacity = static_capacity()
    latency = [compare_latency(load, capacity) for load in (*LOADS, math.inf)]
    names = [*(f"{load:.0%}" for load in LOADS), "all at once"]
    print_table(
        ["of static's capacity", "continuous, P95 of the short, s", "static, s", "ratio"],
        [[name, row["continuous"], row["static"], row["ratio"]] for name, row in zip(names, latency, strict=True)],
    )
    found = [row | {"load": name} for name, row in zip(names, latency, strict=True)]
    write_result(options.out, {"mix": throughput, "short_and_long": found})


if __name__ == "__main__":
    main()
