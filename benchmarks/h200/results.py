"""The file of figures: what they were measured on first, then one object for each."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RATE, STEP = "output tok/s", "ms/token"
REQUESTS = "requests/s"
RATES = (RATE, REQUESTS)
"""More is better."""
UNITS = {
    "decode": STEP,
    "nano": RATE,
    "uniform": RATE,
    "mix": RATE,
    "prefix": RATE,
    "mixed": "ms",
    "documents": REQUESTS,
    "kv": "tokens",
    "startup": "s",
    "recovery": "s",
    "idle": "share",
}
"""By the first word of a case; more is better for ``RATES``, less for the others."""
RATIOS = {
    "graphs_gain_b1": ("decode_b1_eager", "decode_b1"),
    "invariant_cost_b1": ("decode_b1_invariant", "decode_b1"),
    "invariant_cost_b32": ("decode_b32_invariant", "decode_b32"),
    "invariant_cost_nano": ("nano", "nano_invariant"),
    "target_itl_cost": ("nano", "nano_itl"),
}
"""Cases that are one figure divided by another."""
CANARY_ADDITIONS = 10_000_000


class Results:
    """Figures by model and case; the file is written anew after each.

    Args:
        path: of the JSON file.
        environment: what all figures of this run were measured on.
        keep: let figures stand that are in the file and are not measured now. Those of another commit say so.
    """

    def __init__(self, path: Path, environment: dict[str, Any], *, keep: bool = False) -> None:
        self.path = path
        self.environment = environment
        self._figures: dict[tuple[str, str], dict[str, Any]] = {}
        if keep and path.exists():
            before, *figures = json.loads(path.read_text())
            for figure in figures:
                if before.get("commit") != environment.get("commit"):
                    figure.setdefault("commit", before.get("commit"))
                self._figures[figure["model"], figure["case"]] = figure

    def value(self, model: str, case: str) -> float | None:
        found = self._figures.get((model, case))
        return None if found is None else float(found["value"])

    def all(self) -> list[dict[str, Any]]:
        """The environment, and all figures: what the file holds."""
        return [self.environment, *self._figures.values()]

    def add(self, model: str, case: str, runs: Sequence[float]) -> None:
        """Note the best of ``runs`` and the ratios that it completes, and write the file."""
        unit = UNITS[case.partition("_")[0]]
        best = max(runs) if unit in RATES else min(runs)
        self._set(model, case, best, unit, len(runs), runs=[_rounded(run) for run in runs])
        for name, (above, below) in RATIOS.items():
            over, under = self.value(model, above), self.value(model, below)
            if case in (above, below) and over and under:
                repeats = min(self._figures[model, each]["repeats"] for each in (above, below))
                self._set(model, name, over / under, "ratio", repeats)
        self.path.write_text(json.dumps(self.all(), indent=1) + "\n")

    def _set(self, model: str, case: str, value: float, unit: str, repeats: int, **more: Any) -> None:
        figure = {"model": model, "case": case, "value": _rounded(value), "unit": unit, "repeats": repeats, **more}
        self._figures[model, case] = figure


def environment(commit: str) -> dict[str, Any]:
    """What figures depend on; ``commit`` may be empty where git knows it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, _, driver = _said(*query).partition(", ")
    return {
        "commit": commit or _said("git", "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "driver": driver,
        "gpu": gpu,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "host_canary_s": canary(),
    }


def canary() -> float:
    """Seconds of ten million additions in Python: how fast the host's CPU is for one thread."""
    began = time.perf_counter()
    total = 0
    while total < CANARY_ADDITIONS:
        total += 1
    return round(time.perf_counter() - began, 3)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    """The first line of a command's output; empty when there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
