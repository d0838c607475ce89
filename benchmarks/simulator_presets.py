"""The times of the simulator's H200 presets, fitted to what whole engines took on one.

    python -m benchmarks.simulator_presets [--models llama8b qwen06b] [--rounds 3]

`benchmarks/results/h200.json` holds the time of a decode step of 1, 8 and 32 rows, and the throughput of the workloads
`nano`, `uniform` and `mix`. Each workload is simulated with the settings of its measurement, and the costs of a step
are moved, by Gauss-Newton on the logarithms of both, until the simulation gives what was measured. The cost of prefill
attention is not fitted: 440 TFLOP/s, as measured alone (docs/performance-notes.md). A prior with little weight keeps
costs that the workloads do not tell apart near those of the parts: products as measured, keys and values at 3.9 TB/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from core_engine.engine_config import core_config_for, scheduler_for
from core_engine.step_time import StepCosts, StepLoad
from headrace.bench.workloads import WORKLOADS
from headrace.simulate.device import Device
from headrace.simulate.run import Simulator
from headrace.simulate.trace import VOCAB_SIZE, TraceRequest
from shared.config import Settings

Floats: TypeAlias = npt.NDArray[np.float64]

RESULTS = Path(__file__).parent / "results" / "h200.json"
PRIORS = {
    "llama8b": StepCosts(step=4.2e-3, token=1.15e-5, more_token=1.0e-5, context=3.4e-8, pair=1.2e-9),
    "qwen06b": StepCosts(step=0.88e-3, token=2e-6, more_token=1e-6, context=2.9e-8, pair=5.2e-10),
}
NUM_BLOCKS = {"llama8b": 45_000, "qwen06b": 60_000}
DECODES = {"decode_b1": 1, "decode_b8": 8, "decode_b32": 32}
LOADS = ("nano", "uniform", "mix")
NUM_FITTED = 4
"""All costs but the last."""
PRIOR_WEIGHT = 0.05
STEP_OF_LOG = 0.1


def measured(model: str) -> dict[str, float]:
    """ms per decode step, or output tok/s, by case."""
    rows = json.loads(RESULTS.read_text())
    wanted = {*DECODES, *LOADS}
    return {row["case"]: row["value"] for row in rows if row.get("model") == model and row["case"] in wanted}


def simulated(model: str, costs: StepCosts) -> dict[str, float]:
    """The same by the simulator."""
    found = {}
    for case, rows in DECODES.items():
        found[case] = 1e3 * costs.of(StepLoad(rows, rows * 256, 0.0, False))
    settings = Settings(enable_prefix_caching=False, target_itl_ms=0.0)
    core = core_config_for(settings, scheduler_for(settings, 8192, "cuda"), VOCAB_SIZE)
    device = Device(name=model, kind="cuda", costs=costs, pads_steps=True)
    for case in LOADS:
        requests = WORKLOADS[case].make(None, VOCAB_SIZE, 0)
        trace = [TraceRequest(arrival_s=0.0, prompt=len(ids), output=output) for ids, output in requests]
        simulator = Simulator(core, device, trace, num_blocks=NUM_BLOCKS[model])
        outcome = simulator.run()
        found[case] = float(outcome.output.sum()) / simulator.now
    return found


def fit(model: str, rounds: int) -> StepCosts:
    """Move the costs until the simulation gives what was measured."""
    goal = measured(model)
    prior = np.log(np.array(PRIORS[model]))
    logs = prior.copy()

    def costs_of(values: Floats) -> StepCosts:
        return StepCosts(*np.exp(values).tolist())

    def results(values: Floats) -> Floats:
        found = simulated(model, costs_of(values))
        return np.log(np.array([found[case] for case in goal], np.float64))

    wanted = np.log(np.array(list(goal.values())))
    for _ in range(rounds):
        base = results(logs)
        jacobian = np.empty((len(goal), NUM_FITTED))
        for index in range(NUM_FITTED):
            moved = logs.copy()
            moved[index] += STEP_OF_LOG
            jacobian[:, index] = (results(moved) - base) / STEP_OF_LOG
        pull = PRIOR_WEIGHT * np.eye(NUM_FITTED)
        rows = np.vstack([jacobian, pull])
        sides = np.concatenate([wanted - base, PRIOR_WEIGHT * (prior - logs)[:NUM_FITTED]])
        change, *_ = np.linalg.lstsq(rows, sides, rcond=None)
        logs[:NUM_FITTED] += np.clip(change, -0.7, 0.7)
    return costs_of(logs)


def report(model: str, costs: StepCosts) -> None:
    found, goal = simulated(model, costs), measured(model)
    print(f"{model}: " + ", ".join(f"{name}={value:.3g}" for name, value in costs._asdict().items()))
    for case, value in goal.items():
        print(f"  {case:<12} measured {value:10.4g}  simulated {found[case]:10.4g}  x {found[case] / value:.3f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(PRIORS), default=list(PRIORS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    for model in args.models:
        report(model, fit(model, args.rounds))


if __name__ == "__main__":
    main()
