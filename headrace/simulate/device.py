"""How long a device takes for a step, and how much memory it has."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from core_engine.step_time import CPU_COSTS, StepCosts, StepLoad
from shared.errors import StartupError
from shared.step_shapes import padded_total

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One worker with one model on it. Seconds and bytes."""

    name: str
    kind: str
    """``cpu`` or ``cuda``: the defaults of the scheduler differ."""
    costs: StepCosts
    gap_s: float = 0.0
    """Between two steps, although the next one is there: what ``costs`` do not hold."""
    latency_s: float = 0.0
    """What a step takes on top if it finds the device idle: planning, the way there and back."""
    request_s: float = 0.0
    """From a client to the engine and back, once for each request: HTTP, tokenizing, the links."""
    pads_steps: bool = False
    """Steps with prefills are padded as ``shared.step_shapes`` says."""
    memory_bytes: int | None = None
    weights_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    copy_rates: tuple[float, float] = (5e9, 5e9)
    """Bytes per second of KV blocks to host memory and back."""
    source: str = ""
    """Where the numbers come from, for a reader."""

    def seconds(self, load: StepLoad) -> float:
        """What a step takes on the device."""
        if self.pads_steps and load.is_prefill:
            load = load._replace(tokens=padded_total(load.tokens))
        return self.costs.of(load)


_ON_H200 = "fitted to decode steps and whole workloads on one H200 (benchmarks/simulator_presets.py)"
PRESETS = {
    device.name: device
    for device in (
        Device(
            name="h200-llama-8b",
            kind="cuda",
            costs=StepCosts(step=4.23e-3, token=1.22e-5, more_token=1.03e-5, context=3.24e-8, pair=1.2e-9),
            pads_steps=True,
            copy_rates=(50e9, 50e9),
            memory_bytes=140 * GIB,
            weights_bytes=16_060_522_496,
            kv_bytes_per_token=131_072,
            source=_ON_H200,
        ),
        Device(
            name="h200-qwen3-0.6b",
            kind="cuda",
            costs=StepCosts(step=9.17e-4, token=1.29e-6, more_token=6.82e-7, context=3.17e-8, pair=5.2e-10),
            pads_steps=True,
            copy_rates=(50e9, 50e9),
            memory_bytes=140 * GIB,
            weights_bytes=1_192_099_840,
            kv_bytes_per_token=114_688,
            source=_ON_H200,
        ),
        Device(
            name="cpu-demo",
            kind="cpu",
            costs=CPU_COSTS,
            gap_s=1e-3,
            request_s=5e-3,
            weights_bytes=269_030_016,
            kv_bytes_per_token=23_040,
            source="the prior of the engine for a 135M model on two cores; --fit makes it yours",
        ),
    )
}


def load_device(name: str) -> Device:
    """A preset, or a JSON file that ``save_device`` wrote.

    Raises:
        StartupError: neither, or the file has other fields.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith(".json"):
        raise StartupError(f"--device {name} is neither a .json file nor one of {', '.join(PRESETS)}")
    try:
        with open(name, encoding="utf-8") as file:
            fields = json.load(file)
        fields["costs"] = StepCosts(**fields["costs"])
        if "copy_rates" in fields:
            to_host, to_device = fields["copy_rates"]
            fields["copy_rates"] = to_host, to_device
        device = Device(**{"name": name} | fields)
        numbers = [*device.costs, device.gap_s, device.latency_s, device.request_s, *device.copy_rates]
        if device.kind not in ("cpu", "cuda") or not all(0.0 <= number < math.inf for number in numbers):
            raise ValueError("kind is cpu or cuda, and all times are 0 or more")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StartupError(f"--device {name} cannot be used: {error}") from error
    return device


def save_device(path: str, device: Device) -> None:
    """Write a device for ``load_device``.

    Raises:
        StartupError: the file cannot be written.
    """
    fields: dict[str, Any] = dataclasses.asdict(device) | {"costs": device.costs._asdict()}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(fields, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error}") from error
