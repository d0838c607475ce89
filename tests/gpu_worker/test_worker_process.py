"""The worker as a process of its own, with a scripted engine on the other end of real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runner_harness import reference_greedy, worker_config
from scripted_engine import PROMPT, ROOT, ScriptedEngine
from tiny_models import TinyModels
from waiting import wait_until

from shared.messages import Hello, StepResult, WorkerFailed


def test_serves_an_epoch_with_two_steps_in_flight_and_survives_a_new_one(
    engine: ScriptedEngine, tiny_models: TinyModels
) -> None:
    folder = tiny_models.folder("llama")
    config = worker_config(folder)
    peer, hello = engine.expect(Hello)
    assert (hello.role, hello.name, hello.ready) == ("gpu_worker", "w", False)
    assert peer.startswith("w/")
    ready = engine.begin(1, config)
    assert (ready.error, ready.num_blocks, ready.device, ready.dtype) == (None, 200, "cpu", "float32")
    assert ready.block_bytes == 2 * 3 * 2 * 16 * 16 * 4
    engine.expect(Hello, lambda h: h.ready)

    expected = reference_greedy(folder, PROMPT, 20)
    engine.start_request(1)
    engine.send(2, 1, decode=[0], sample=[(0, 0)])
    output = engine.result(1, 1)
    for number in range(3, 21):
        engine.send(number, 1, decode=[0], sample=[(0, 0)])
        output += engine.result(number - 1, 1)
    output += engine.result(20, 1)
    assert output == expected

    again = engine.begin(1, config)
    assert again.num_blocks == ready.num_blocks
    engine.send(21, 1, decode=[0], sample=[(0, 0)])
    assert len(engine.result(21, 1)) == 1, "the same epoch again clears nothing"

    engine.begin(2, config)
    engine.send(22, 1, decode=[0], sample=[(0, 0)])
    engine.start_request(2)
    assert engine.result(1, 2) == expected[:1], "a step of the old epoch is dropped, and the slot is free again"

    bigger = engine.begin(3, dataclasses.replace(config, num_blocks_override=300, num_slots=20))
    assert bigger.num_blocks == 300
    engine.start_request(3)
    assert engine.result(1, 3) == expected[:1]
    assert engine.close() == 0


def test_what_ends_an_epoch(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    config = worker_config(tiny_models.folder("llama"))
    engine.begin(1, config)
    engine.start_request(1)
    engine.send(3, 1, decode=[0], sample=[(0, 0)])
    engine.result(1, 1)
    _, failed = engine.expect(WorkerFailed)
    assert (failed.epoch.counter, failed.number) == (1, 3)
    assert "step 3 came where step 2 was due" in failed.reason
    engine.send(2, 1, decode=[0], sample=[(0, 0)])

    engine.begin(2, config)
    engine.start_request(2)
    engine.result(1, 2)
    engine.send(2, 2, decode=[5], sample=[(0, 5)])
    _, failed = engine.expect(WorkerFailed)
    assert (failed.epoch.counter, failed.number) == (2, 2)
    assert "slot 5" in failed.reason

    engine.begin(3, config)
    engine.start_request(3)
    engine.result(1, 3)
    engine.link.socket.send_multipart([b"w/steps", b"not a message"])
    _, failed = engine.expect(WorkerFailed)
    assert (failed.epoch.counter, failed.number) == (3, 2)
    assert "malformed" in failed.reason

    engine.begin(4, config)
    engine.start_request(4)
    assert len(engine.result(1, 4)) == 1


def test_a_model_that_cannot_be_loaded_is_reported_and_ends_the_worker(
    engine: ScriptedEngine, tiny_models: TinyModels, tmp_path: Path
) -> None:
    source = tiny_models.folder("llama")
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    ready = engine.begin(1, worker_config(folder))
    assert ready.error is not None
    assert "model.layers.1.mlp.up_proj.weight" in ready.error
    assert engine.process.wait(20) == 78


def test_needs_an_endpoint() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "HEADRACE_WORKER_ENDPOINT"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpu_worker"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78
    assert "--worker-endpoint" in done.stderr


def test_the_log_says_whether_an_engine_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that is asked for at a wrong address would wait for it in silence."""
    log = ""
    with contextlib.closing(ScriptedEngine(tmp_path)) as engine:

        def said(words: str) -> bool:
            nonlocal log
            log += capfd.readouterr().err
            return words in log

        _until(lambda: said(f"no engine answers yet; still trying endpoint={engine.link.endpoint}"))
        assert not said("the engine answers")
        _until(lambda: engine.expect(Hello) is not None and said("the engine answers"))
        _until(lambda: said("") and log.count("no engine answers yet") == 2)


_until = functools.partial(wait_until, seconds=60.0, every_s=0.05)


def test_arrays_of_results_are_int32(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    engine.begin(1, worker_config(tiny_models.folder("qwen3"), dtype="bfloat16"))
    engine.start_request(1)
    _, result = engine.expect(StepResult)
    assert result.tokens.dtype == np.int32
    assert not len(result.counts)
