"""A device fitted to the step log of a real server."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from core_engine.step_time import KNEE, NUM_COSTS, StepCosts
from headrace.simulate.device import Device
from shared.errors import StartupError

Floats: TypeAlias = npt.NDArray[np.float64]

FEWEST_STEPS = 50
ROUNDS = 6
MOST_TIMES_THE_FIT = 5.0
"""Steps that took longer than this many times what the others predict, such as the first of a shape, do not count."""
PRIOR_WEIGHT = 1e-3
"""What no step of the log tells, such as the price of a long context, keeps its proportion in the prior."""


class StepTimes(NamedTuple):
    """The settled steps of a log as arrays [steps]."""

    work: Floats
    """[steps, 5] what each of ``StepCosts`` is multiplied by."""
    compute_s: Floats
    wall_s: Floats
    follows: npt.NDArray[np.bool_]
    """It was in flight already when the step before it was settled."""


def read_step_log(path: str) -> StepTimes:
    """The lines of ``--step-log`` that tell a time.

    Raises:
        StartupError: it cannot be read, or there are too few of them.
    """
    rows: list[tuple[float, ...]] = []
    in_flight: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for line in file:
                if b'"wall_s"' not in line or not line.endswith(b"\n"):
                    continue
                step = orjson.loads(line)
                replica = f"{step['replica']}/{step['epoch']}"
                follows = in_flight.get(replica, 0) > 0
                in_flight[replica] = step["num_in_flight"]
                if step["compute_s"] > 0.0:
                    tokens = step["num_tokens"]
                    work = (1.0, tokens, max(tokens - KNEE, 0), step["context"], step["pairs"])
                    rows.append((*work, step["compute_s"], step["wall_s"], follows))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"--fit {path} cannot be read: {error!r}") from error
    if len(rows) < FEWEST_STEPS:
        raise StartupError(f"--fit {path} tells the time of {len(rows)} steps; {FEWEST_STEPS} are needed")
    table = np.array(rows, np.float64)
    return StepTimes(table[:, :5], table[:, 5], table[:, 6], table[:, 7] > 0)


def fit_device(times: StepTimes, prior: Device, source: str) -> Device:
    """``prior`` with the costs, the gap and the latency of a log."""
    costs = fit_costs(times, prior.costs)
    predicted = times.work @ np.array(costs)
    usual = times.compute_s < MOST_TIMES_THE_FIT * predicted
    over = np.maximum(times.wall_s - times.compute_s, 0.0)
    following, alone = over[usual & times.follows], over[usual & ~times.follows]
    gap = float(_trimmed_mean(following)) if len(following) else prior.gap_s
    latency = max(float(np.median(alone)) - gap, 0.0) if len(alone) else prior.latency_s
    error = float(np.abs(predicted / times.compute_s - 1.0)[usual].mean())
    words = f"fitted to {len(times.compute_s)} steps of {source}, mean error of a step {error:.0%}"
    return dataclasses.replace(prior, costs=costs, gap_s=gap, latency_s=latency, source=words)


def fit_costs(times: StepTimes, prior: StepCosts) -> StepCosts:
    """Non-negative least squares, with a variance of each step that is proportional to its time.

    So all steps together take what they took, and long ones count for what they are. ``StepTimeModel`` takes errors
    relative to the measured time to be safe from outliers, which makes the sum come out short; here these are left out.
    """
    scaled = times.work * np.array(prior)
    found = np.full(NUM_COSTS, float(times.compute_s.sum() / scaled.sum()))
    for _ in range(ROUNDS):
        predicted = scaled @ found
        usual = times.compute_s < MOST_TIMES_THE_FIT * predicted
        weights = predicted[usual] ** -0.5
        rows, sides = scaled[usual] * weights[:, None], times.compute_s[usual] * weights
        matrix, vector = rows.T @ rows, rows.T @ sides
        pull = PRIOR_WEIGHT * float(np.trace(matrix)) / NUM_COSTS
        units = float(np.median(found[found > 0.0]))
        found = _non_negative(matrix + pull * np.eye(NUM_COSTS), vector + pull * units)
    return StepCosts(*(found * np.array(prior)).tolist())


def _non_negative(matrix: Floats, vector: Floats) -> Floats:
    """The x >= 0 with the least x·matrix·x / 2 - vector·x: the best of all choices of what is above zero."""
    best, least = np.zeros(NUM_COSTS), 0.0
    for size in range(1, NUM_COSTS + 1):
        for free in map(list, itertools.combinations(range(NUM_COSTS), size)):
            part = np.linalg.solve(matrix[np.ix_(free, free)], vector[free])
            value = -float(vector[free] @ part) / 2
            if part.min() >= 0.0 and value < least:
                best, least = np.zeros(NUM_COSTS), value
                best[free] = part
    return best


def _trimmed_mean(values: Floats) -> float:
    """Without the highest 2 %: pauses of the machine, not of the engine."""
    kept = np.sort(values)[: max(int(0.98 * len(values)), 1)]
    return float(kept.mean())
