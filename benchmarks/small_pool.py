"""A pool a third of what the load wants: admission and preemption against the best --max-num-seqs set by hand.

    python -m benchmarks.small_pool [--loads mix ...] [--out benchmarks/results/small_pool.json]

The real scheduler and block manager on a simulated clock; the result does not depend on the machine. What a load wants
is the most blocks that it ever holds when there are more than enough. With a third of them it is run with the engine's
default of 1,024 seats, and once for each number of seats of ``SEATS``: the best of these is what an operator could have
found who knew the load in advance. Two devices: 20 ms a step whatever it computes, on which more at once is always
better and recomputing is free, and the model of an 8B model on an H200 (``headrace simulate``).

- mix: 1,000 requests, lognormal lengths, all there at the start; each client asks for as many tokens as it gets, or for
  1,024 whatever it gets (``lengths unknown``).
- documents: 300 requests of 1,500 to 2,500 in and 50 to 500 out; all ask for 1,000.
- long answers: 300 requests, all there at the start, 128 in and 500 to 1,500 out; all ask for 1,900. Nothing ends for
  500 steps, while all of them grow: the worst there is for an engine that admits more than fit in the end.

Recomputed: tokens computed again after preemptions, by prompt tokens, each prompt counted once; and by all tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.simulated import CONSTANT, core_config, mix, print_table, write_result
from headrace.simulate.device import PRESETS, Device
from headrace.simulate.run import Outcome, Simulator
from headrace.simulate.trace import TraceRequest

SEATS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320)
PLENTY = 200_000
"""Blocks."""
MAX_MODEL_LEN = 4096
DEVICES = {"20 ms a step": CONSTANT, "8B on an H200": PRESETS["h200-llama-8b"]}


def uniform(count: int, prompt: tuple[int, int], output: tuple[int, int], max_tokens: int) -> list[TraceRequest]:
    """Lengths drawn evenly from the two ranges, ends included."""
    rng = np.random.default_rng(0)
    prompts, outputs = (rng.integers(low, high + 1, count).tolist() for low, high in (prompt, output))
    return [
        TraceRequest(arrival_s=0.0, prompt=tokens_in, output=tokens_out, max_tokens=max_tokens)
        for tokens_in, tokens_out in zip(prompts, outputs, strict=True)
    ]


LOADS = {
    "mix": mix(),
    "mix, lengths unknown": mix(max_tokens=1024),
    "documents": uniform(300, (1500, 2500), (50, 500), 1000),
    "long answers": uniform(300, (128, 128), (500, 1500), 1900),
}


def run(trace: list[TraceRequest], device: Device, num_blocks: int, seats: int | None = None) -> Outcome:
    """``seats``: None: the engine's default."""
    return Simulator(core_config(MAX_MODEL_LEN, max_num_seqs=seats), device, trace, num_blocks=num_blocks).run()


def output_rate(outcome: Outcome) -> float:
    """Output tokens/s."""
    return float(outcome.output.sum() / outcome.ended.max())


def compare(name: str, device: str) -> dict[str, Any]:
    trace = LOADS[name]
    wanted = int(run(trace, DEVICES[device], PLENTY).timeline.table()["used_blocks"].max())
    num_blocks = wanted // 3 + 1
    by_seats = {seats: output_rate(run(trace, DEVICES[device], num_blocks, seats)) for seats in SEATS}
    best = max(by_seats, key=lambda seats: by_seats[seats])
    outcome = run(trace, DEVICES[device], num_blocks)
    prompt, output = int(outcome.prompt.sum()), int(outcome.output.sum())
    return {
        "load": name,
        "device": device,
        "wanted_blocks": wanted,
        "blocks": num_blocks - 1,
        "tokens_per_s": output_rate(outcome),
        "best_seats": best,
        "best_tokens_per_s": by_seats[best],
        "ratio": output_rate(outcome) / by_seats[best],
        "preemptions": outcome.preemptions,
        "recomputed_by_prompt_tokens": outcome.recomputed_tokens / prompt,
        "recomputed_by_all_tokens": outcome.recomputed_tokens / (prompt + output),
        "by_seats": by_seats,
    }


def cells(row: dict[str, Any]) -> list[object]:
    """Of the printed table."""
    return [
        row["load"],
        row["device"],
        f"{row['blocks']:,}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['best_tokens_per_s']:,.0f} with {row['best_seats']} seats",
        row["ratio"],
        row["preemptions"],
        f"{row['recomputed_by_prompt_tokens']:.3f} ({row['recomputed_by_all_tokens']:.3f} of all)",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="LOAD")
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()
    found = [compare(load, device) for load in options.loads for device in DEVICES]
    head = ["load", "device", "blocks", "tokens/s", "best by hand", "of it", "preemptions", "recomputed / prompt"]
    print_table(head, [cells(row) for row in found])
    write_result(options.out, found)


if __name__ == "__main__":
    main()
