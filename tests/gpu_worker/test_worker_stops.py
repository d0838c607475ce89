"""How a worker process leaves, and what it does when it was stopped for a while."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runner_harness import reference_greedy, worker_config
from scripted_engine import PROMPT, ScriptedEngine
from tiny_models import TinyModels

from shared.messages import Dismissed, Epoch, Hello, Init, Ready, StepResult
from shared.model_source import resolve_model

PATIENT = ("--beat-s=5",)


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """With a worker that takes this test for a silent engine only after 15 s."""
    made = ScriptedEngine(tmp_path, *PATIENT)
    yield made
    made.close()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """With a worker that waits 4 s to be dismissed."""
    made = ScriptedEngine(tmp_path, *PATIENT, "--shutdown-timeout=4")
    yield made
    made.close()


def start(engine: ScriptedEngine, models: TinyModels) -> list[int]:
    """A request of which two steps are in flight; the tokens that it has to give, six of them."""
    folder = models.folder("llama")
    engine.begin(1, worker_config(folder))
    engine.start_request(1)
    engine.send(2, 1, decode=[0], sample=[(0, 0)])
    return reference_greedy(folder, PROMPT, 6)


def leave(engine: ScriptedEngine, signum: signal.Signals = signal.SIGTERM) -> None:
    """Ask the worker to stop and wait until it says that it will."""
    engine.signal(signum)
    engine.expect(Hello, lambda hello: hello.leaving)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_stop_computes_on_until_it_is_dismissed(
    patient: ScriptedEngine, tiny_models: TinyModels, signum: signal.Signals
) -> None:
    expected = start(patient, tiny_models)
    leave(patient, signum)
    output = []
    for number in range(3, 7):
        patient.send(number, 1, decode=[0], sample=[(0, 0)])
        output += patient.result(number - 2, 1)
    patient.link.send("w/steps", Dismissed(Epoch(patient.boot, 0)))
    output += patient.result(5, 1) + patient.result(6, 1)
    assert output == expected
    _, hello = patient.expect(Hello, lambda hello: hello.leaving)
    assert hello.ready, "it goes on, and a dismissal of an earlier epoch is none"
    patient.link.send("w/steps", Dismissed(Epoch(patient.boot, 1)))
    assert patient.process.wait(20) == 0


def test_a_dismissal_of_a_worker_that_stays_does_nothing(patient: ScriptedEngine, tiny_models: TinyModels) -> None:
    expected = start(patient, tiny_models)
    patient.link.send("w/steps", Dismissed(Epoch(patient.boot, 1)))
    patient.send(3, 1, decode=[0], sample=[(0, 0)])
    assert [token for number in (1, 2, 3) for token in patient.result(number, 1)] == expected[:3]
    leave(patient)
    assert patient.process.poll() is None


def test_a_worker_that_nobody_dismisses_ends_when_its_time_is_over(
    impatient: ScriptedEngine, tiny_models: TinyModels
) -> None:
    expected = start(impatient, tiny_models)
    assert impatient.result(1, 1) + impatient.result(2, 1) == expected[:2]
    asked = time.monotonic()
    leave(impatient)
    assert impatient.wait(60) == 0
    assert time.monotonic() - asked > 3.9


def test_a_second_signal_ends_a_worker_at_once(patient: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(patient, tiny_models)
    leave(patient)
    patient.signal(signal.SIGTERM)
    assert patient.process.wait(20) == 128 + signal.SIGTERM


def test_a_worker_whose_engine_is_gone_ends_at_once(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    engine.result(1, 1)
    engine.link.close()
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(20) == 0


def test_a_worker_whose_engine_goes_while_it_leaves_ends_then(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.link.close()
    assert engine.process.wait(20) == 0


@pytest.mark.parametrize("works", [True, False], ids=["with work", "idle"])
def test_a_worker_whose_engine_answers_no_more_ends_soon(
    engine: ScriptedEngine, tiny_models: TinyModels, works: bool
) -> None:
    """It stands still, or something between keeps the connection open: no signal but silence."""
    if works:
        start(engine, tiny_models)
    else:
        engine.begin(1, worker_config(tiny_models.folder("llama")))
    leave(engine)
    assert engine.process.wait(20) == 0  # of 30 s that it may take


def test_a_worker_that_is_held_up_ends_when_its_time_is_over(
    impatient: ScriptedEngine, tiny_models: TinyModels
) -> None:
    start(impatient, tiny_models)
    leave(impatient)
    impatient.stop()  # stands for a call that does not return: no Python runs any more
    while not impatient.pending(signal.SIGALRM):
        time.sleep(0.05)
    impatient.signal(signal.SIGCONT)
    assert impatient.process.wait(20) == -signal.SIGALRM


def test_a_worker_without_a_model_ends_at_once(engine: ScriptedEngine) -> None:
    engine.expect(Hello)
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(20) == 0


def test_a_worker_that_loads_ends_at_once(engine: ScriptedEngine) -> None:
    engine.expect(Hello)
    model = resolve_model("demo").path
    loading = False
    while not loading:
        engine.link.send("w/steps", Init(Epoch(engine.boot, 1), worker_config(model, num_blocks_override=None)))
        loading = engine.expect(Hello)[1].status.startswith("loading")
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(20) == 0


def test_an_engine_that_was_started_again_dismisses_too(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.link.send("w/steps", Dismissed(Epoch(engine.boot ^ 1, 1)))
    assert engine.process.wait(20) == 0


def test_a_new_epoch_lets_a_leaving_worker_go(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.link.send("w/steps", Init(Epoch(engine.boot, 2), worker_config(tiny_models.folder("llama"))))
    assert engine.process.wait(20) == 0


def test_a_worker_that_was_stopped_for_a_while_takes_part_again_by_itself(
    engine: ScriptedEngine, tiny_models: TinyModels
) -> None:
    config = worker_config(tiny_models.folder("llama"))
    expected = start(engine, tiny_models)
    assert engine.result(1, 1) + engine.result(2, 1) == expected[:2]

    engine.stop()
    engine.send(3, 1, decode=[0], sample=[(0, 0)])
    for _ in range(3):
        assert engine.link.send("w/steps", Init(Epoch(engine.boot, 2), config)), "as an engine does that hears nothing"
    engine.send(4, 1, decode=[0], sample=[(0, 0)])
    time.sleep(1)

    engine.signal(signal.SIGCONT)
    engine.expect(Ready, lambda ready: ready.epoch.counter == 2)
    engine.start_request(2)
    engine.send(5, 1, decode=[0], sample=[(0, 0)])
    engine.send(2, 2, decode=[0], sample=[(0, 0)])
    assert engine.result(1, 2) + engine.result(2, 2) == expected[:2], "the slot and the numbers began anew"
    assert not [m for _, m in engine.inbox if isinstance(m, StepResult) and m.number > 3], "stale steps are dropped"
    engine.expect(Hello, lambda hello: hello.ready)
