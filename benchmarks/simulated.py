"""What the benchmarks on a simulated clock share: loads, a device of constant step time, the engine's settings.

They run the real scheduler and block manager through ``headrace.simulate``; only the time of a step is made up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_engine.core import CoreConfig
from core_engine.engine_config import core_config_for, scheduler_for
from core_engine.step_time import StepCosts
from headrace.bench.workloads import lognormal_lengths
from headrace.simulate.device import Device
from headrace.simulate.trace import VOCAB_SIZE, TraceRequest
from shared.config import Settings

STEP_S = 0.020
CONSTANT = Device(
    name="constant",
    kind="cuda",
    costs=StepCosts(step=STEP_S, token=0.0, more_token=0.0, context=0.0, pair=0.0),
    source="20 ms a step, whatever it computes",
)
BLOCK_SIZE = 16
LONGEST = 2048
"""Tokens of the longest request that ``mix`` may hold: 1,024 in, 1,024 out."""


def mix(count: int = 1000, max_tokens: int | None = None) -> list[TraceRequest]:
    """The lengths of ``headrace bench throughput --dataset-name mix``, all there at the start.

    Args:
        max_tokens: what each client asks for; the outputs end where they do. None: as if all knew how long theirs is.
    """
    return [
        TraceRequest(arrival_s=0.0, prompt=prompt, output=output, max_tokens=max_tokens)
        for prompt, output in lognormal_lengths(count)
    ]


def core_config(max_model_len: int = LONGEST, **settings: Any) -> CoreConfig:
    """The engine with its defaults on a GPU, but for the given ``settings``."""
    chosen = Settings(max_num_queued_reqs=10**6, **settings)
    return core_config_for(chosen, scheduler_for(chosen, max_model_len, "cuda"), VOCAB_SIZE)


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """As Markdown; floats with three significant digits."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        cells = [f"{cell:,.3g}" if isinstance(cell, float) else str(cell) for cell in row]
        print("| " + " | ".join(cells) + " |", flush=True)


def write_result(path: str | None, result: object) -> None:
    """Write ``result`` as JSON, if a path is given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
