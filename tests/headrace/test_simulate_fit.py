"""Devices: presets, files, memory, and the fit to a step log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from core_engine.step_record import StepLog, StepTiming
from core_engine.step_time import StepCosts, StepLoad
from headrace.bench.offline import SHAPES
from headrace.simulate.device import GIB, PRESETS, Device, load_device, save_device
from headrace.simulate.fit import fit_device, read_step_log
from headrace.simulate.memory import find_memory, num_weights, with_model
from shared.config import Settings
from shared.errors import StartupError
from shared.model_config import load_model_config
from shared.model_source import local_source

TRUE = Device(
    name="true",
    kind="cpu",
    costs=StepCosts(step=0.02, token=3e-3, more_token=0.0, context=4e-6, pair=2e-6),
    gap_s=0.0015,
    latency_s=0.004,
)
PRIOR = PRESETS["cpu-demo"]


def step_log(path: Path, device: Device, *, count: int = 600, noise: float = 0.1, outliers: int = 3) -> str:
    """Write the log of a made-up server on a device, with errors of its clock and a few very slow steps."""
    rng = np.random.default_rng(0)
    log = StepLog(str(path))
    in_flight = 0
    for number in range(count):
        decodes, prompt = int(rng.integers(0, 40)), int(rng.integers(16, 400)) if rng.random() < 0.3 else 0
        load = StepLoad(max(decodes, 1) + prompt, 200 * decodes, prompt**2 / 2, prompt > 0)
        seconds = device.costs.of(load) * rng.lognormal(0.0, noise) * (30 if number < outliers else 1)
        wall = seconds + device.gap_s + (0.0 if in_flight else device.latency_s)
        in_flight = 0 if rng.random() < 0.2 else 1
        log(
            StepTiming(
                "w", 1, number, number * 0.1, wall, seconds, None, load.tokens, load.context, load.pairs,
                load.is_prefill, in_flight,
            )
        )  # fmt: skip
    log.close()
    return str(path)


def test_fit(tmp_path: Path) -> None:
    found = fit_device(read_step_log(step_log(tmp_path / "steps.jsonl", TRUE)), PRIOR, "a log")
    for load in (StepLoad(1, 200, 0.0, False), StepLoad(30, 6000, 0.0, False), StepLoad(300, 2000, 40_000.0, True)):
        assert found.costs.of(load) == pytest.approx(TRUE.costs.of(load), rel=0.06)
    assert found.costs.more_token < 1e-3
    assert found.gap_s == pytest.approx(TRUE.gap_s, rel=0.05)
    assert found.latency_s == pytest.approx(TRUE.latency_s, rel=0.05)
    assert found.kv_bytes_per_token == PRIOR.kv_bytes_per_token
    assert "600 steps of a log" in found.source


def test_the_steps_of_a_log_take_as_long_as_they_took(tmp_path: Path) -> None:
    """However noisy they were: what counts is their sum."""
    times = read_step_log(step_log(tmp_path / "steps.jsonl", TRUE, noise=0.6, outliers=0))
    found = fit_device(times, PRIOR, "")
    assert (times.work @ np.array(found.costs)).sum() == pytest.approx(times.compute_s.sum(), rel=0.05)


def test_what_a_log_does_not_tell_keeps_its_proportion(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    twice = StepCosts(*(2 * cost for cost in PRIOR.costs))
    step_log(path, dataclasses.replace(TRUE, costs=twice), noise=0.0, outliers=0)
    decodes = "".join(line for line in path.read_text().splitlines(keepends=True) if '"is_prefill":false' in line)
    path.write_text(decodes)
    found = fit_device(read_step_log(str(path)), PRIOR, "")
    assert found.costs.pair == pytest.approx(twice.pair, rel=0.1)


def test_planned_steps_and_half_a_line_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step_log(path, TRUE, count=60)
    with open(path, "a") as file:
        file.write('{"replica": "w", "rows": []}\n{"replica": "w", "wall_s": 3')
    assert len(read_step_log(str(path)).compute_s) == 60


def test_a_log_that_cannot_be_used(tmp_path: Path) -> None:
    short = step_log(tmp_path / "short.jsonl", TRUE, count=10)
    for path, words in ((short, "10 steps; 50 are needed"), (str(tmp_path / "none.jsonl"), "cannot be read")):
        with pytest.raises(StartupError, match=words):
            read_step_log(path)


def test_devices_are_written_and_read(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.json")
    save_device(path, TRUE)
    assert load_device(path) == TRUE
    fields = json.loads(Path(path).read_text())
    for change in ({"kind": "tpu"}, {"gap_s": -1.0}, {"costs": {"step": 1}}, {"colour": "red"}):
        Path(path).write_text(json.dumps(fields | change))
        with pytest.raises(StartupError, match="cannot be used"):
            load_device(path)
    with pytest.raises(StartupError, match="h200-llama-8b"):
        load_device("h100")


def test_prefills_are_padded_where_the_worker_pads_them() -> None:
    device = PRESETS["h200-llama-8b"]
    one, other = (device.seconds(StepLoad(tokens, 0, 0.0, True)) for tokens in (1025, 1152))
    assert one == other == device.costs.of(StepLoad(1152, 0, 0.0, True))
    assert device.seconds(StepLoad(5, 0, 0.0, False)) == device.costs.of(StepLoad(5, 0, 0.0, False))


@pytest.mark.parametrize(
    ("shape", "preset"),
    [("llama-3.1-8b", "h200-llama-8b"), ("qwen3-0.6b", "h200-qwen3-0.6b"), ("smollm2-135m", "cpu-demo")],
)
def test_sizes_of_models(shape: str, preset: str) -> None:
    path = SHAPES / f"{shape}.json"
    model = load_model_config(local_source(path, str(path)))
    device = PRESETS[preset]
    assert device.weights_bytes == pytest.approx(2 * num_weights(model), rel=0.001)
    found = with_model(Device(name="x", kind="cuda", costs=TRUE.costs), model, Settings(dtype="bfloat16"))
    assert found.kv_bytes_per_token == device.kv_bytes_per_token
    assert with_model(found, model, Settings(dtype="float32")).weights_bytes == 4 * num_weights(model)


def test_memory() -> None:
    device = PRESETS["h200-llama-8b"]

    def blocks(change: Device = device, **flags: object) -> int:
        return find_memory(Settings(**flags), change).num_blocks  # type: ignore[arg-type]

    whole = blocks()
    assert whole == pytest.approx((0.9 * 140 - 14.96 - 2) * GIB / (131_072 * 16), abs=5)
    assert blocks(kv_cache_dtype="fp8") == pytest.approx(2 * whole, abs=2)
    assert blocks(block_size=32) == whole // 2
    assert blocks(kv_cache_bytes=GIB) == GIB // (131_072 * 16)
    assert blocks(num_gpu_blocks_override=77) == 77
    assert blocks(PRESETS["cpu-demo"]) == GIB // (23_040 * 16)
    with pytest.raises(StartupError, match="no KV cache fits"):
        blocks(dataclasses.replace(device, memory_bytes=16 * GIB))
    with pytest.raises(StartupError, match="--gpu-memory"):
        blocks(dataclasses.replace(device, memory_bytes=None))
    with pytest.raises(StartupError, match="--weights-bytes"):
        blocks(dataclasses.replace(device, weights_bytes=None))
    with pytest.raises(StartupError, match="--kv-bytes-per-token"):
        blocks(dataclasses.replace(device, kv_bytes_per_token=None))
