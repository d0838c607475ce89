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


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """With a worker that waits 1.5 s to be dismissed."""
    made = ScriptedEngine(tmp_path, "--shutdown-timeout=1.5")
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
    engine: ScriptedEngine, tiny_models: TinyModels, signum: signal.Signals
) -> None:
    expected = start(engine, tiny_models)
    leave(engine, signum)
    output = []
    for number in range(3, 7):
        engine.send(number, 1, decode=[0], sample=[(0, 0)])
        output += engine.result(number - 2, 1)
    engine.link.send("w/steps", Dismissed(Epoch(engine.boot, 0)))
    output += engine.result(5, 1) + engine.result(6, 1)
    assert output == expected
    _, hello = engine.expect(Hello, lambda hello: hello.leaving)
    assert hello.ready, "it goes on, and a dismissal of an earlier epoch is none"
    engine.link.send("w/steps", Dismissed(Epoch(engine.boot, 1)))
    assert engine.process.wait(10) == 0


def test_a_dismissal_of_a_worker_that_stays_does_nothing(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    expected = start(engine, tiny_models)
    engine.link.send("w/steps", Dismissed(Epoch(engine.boot, 1)))
    engine.send(3, 1, decode=[0], sample=[(0, 0)])
    assert [token for number in (1, 2, 3) for token in engine.result(number, 1)] == expected[:3]
    leave(engine)
    assert engine.process.poll() is None


def test_a_worker_that_nobody_dismisses_ends_when_its_time_is_over(
    impatient: ScriptedEngine, tiny_models: TinyModels
) -> None:
    expected = start(impatient, tiny_models)
    asked = time.monotonic()
    leave(impatient)
    assert impatient.result(1, 1) + impatient.result(2, 1) == expected[:2]
    assert impatient.wait(20) == 0
    assert time.monotonic() - asked > 1.4


def test_a_second_signal_ends_a_worker_at_once(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(10) == 128 + signal.SIGTERM


def test_a_worker_whose_engine_is_gone_ends_at_once(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    engine.result(1, 1)
    engine.link.close()
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(10) == 0


def test_a_worker_whose_engine_goes_while_it_leaves_ends_then(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.link.close()
    assert engine.process.wait(10) == 0


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
    impatient.signal(signal.SIGSTOP)  # stands for a call that does not return: no Python runs any more
    time.sleep(7)
    impatient.signal(signal.SIGCONT)
    assert impatient.process.wait(20) == -signal.SIGALRM


def test_a_worker_without_a_model_ends_at_once(engine: ScriptedEngine) -> None:
    engine.expect(Hello)
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(10) == 0


def test_a_worker_that_loads_ends_at_once(engine: ScriptedEngine) -> None:
    engine.expect(Hello)
    model = resolve_model("demo").path
    loading = False
    while not loading:
        engine.link.send("w/steps", Init(Epoch(engine.boot, 1), worker_config(model, num_blocks_override=None)))
        loading = engine.expect(Hello)[1].status.startswith("loading")
    engine.signal(signal.SIGTERM)
    assert engine.process.wait(10) == 0


def test_an_engine_that_was_started_again_dismisses_too(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.link.send("w/steps", Dismissed(Epoch(engine.boot ^ 1, 1)))
    assert engine.process.wait(10) == 0


def test_a_new_epoch_lets_a_leaving_worker_go(engine: ScriptedEngine, tiny_models: TinyModels) -> None:
    start(engine, tiny_models)
    leave(engine)
    engine.link.send("w/steps", Init(Epoch(engine.boot, 2), worker_config(tiny_models.folder("llama"))))
    assert engine.process.wait(10) == 0


def test_a_worker_that_was_stopped_for_a_while_takes_part_again_by_itself(
    engine: ScriptedEngine, tiny_models: TinyModels
) -> None:
    config = worker_config(tiny_models.folder("llama"))
    expected = start(engine, tiny_models)
    assert engine.result(1, 1) + engine.result(2, 1) == expected[:2]

    engine.signal(signal.SIGSTOP)
    time.sleep(0.1)
    engine.inbox.clear()
    while engine.link.receive() is not None:
        pass
    engine.send(3, 1, decode=[0], sample=[(0, 0)])
    for _ in range(3):
        assert engine.link.send("w/steps", Init(Epoch(engine.boot, 2), config)), "as an engine does that hears nothing"
    engine.send(4, 1, decode=[0], sample=[(0, 0)])
    with pytest.raises(AssertionError, match="no Hello"):
        engine.expect(Hello, seconds=1)

    engine.signal(signal.SIGCONT)
    engine.expect(Ready, lambda ready: ready.epoch.counter == 2)
    engine.start_request(2)
    engine.send(5, 1, decode=[0], sample=[(0, 0)])
    engine.send(2, 2, decode=[0], sample=[(0, 0)])
    assert engine.result(1, 2) + engine.result(2, 2) == expected[:2], "the slot and the numbers began anew"
    assert not [m for _, m in engine.inbox if isinstance(m, StepResult) and m.number > 3], "stale steps are dropped"
    engine.expect(Hello, lambda hello: hello.ready)
