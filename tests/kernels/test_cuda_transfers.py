"""Transfers under the GPU's runner, and which of them are known to be complete. ``tests/gpu`` has more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import make_cuda_runner
from runner_harness import Harness, make_runner, make_step
from tiny_models import TinyModels

from gpu_worker.cuda_transfers import PendingTransfers
from gpu_worker.host_pool import measure_rates
from gpu_worker.step_checks import StepError

PROMPT = [(37 * index) % 300 + 20 for index in range(35)]
COUNT = 3


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels) -> Path:
    """One layer: the interpreter is slow."""
    return tiny_models.folder("qwen3", num_hidden_layers=1)


def make(folder: Path, **options: Any) -> Any:
    known: dict[str, Any] = {"num_slots": 4, "num_blocks": 16, "max_model_len": 512, "num_host_blocks": 5}
    return make_cuda_runner(folder, **{**known, **options})


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_moved_blocks_are_as_good_as_those_that_stayed(folder: Path, graphs: bool) -> None:
    expected = Harness(make_runner(folder)).continued(PROMPT, COUNT, moved=False)[0]
    found, _ = Harness(make(folder, graphs=graphs)).continued(PROMPT, COUNT, moved=True)
    assert found == expected


def test_bytes_of_a_float8_cache(folder: Path) -> None:
    runner = make(folder, cache_dtype=torch.float8_e4m3fn, graphs=False)
    expected, logits = Harness(make(folder, cache_dtype=torch.float8_e4m3fn, graphs=False)).continued(
        PROMPT, COUNT, moved=False
    )
    found, others = Harness(runner).continued(PROMPT, COUNT, moved=True)
    assert found == expected
    for one, other in zip(logits, others, strict=True):
        assert torch.equal(one, other)


def test_rates_and_a_new_epoch(folder: Path) -> None:
    runner = make(folder)
    before = runner.cache.tensor.clone()
    assert min(measure_rates(runner.transfers.seconds_of, runner.cache, runner.host_pool)) > 0
    assert torch.equal(runner.cache.tensor, before)
    launched = runner.launch(make_step(1, transfers=[(0, 1, 0), (1, 2, 1)]))
    runner.reset()
    assert launched.wait().transferred == 1
    assert runner.launch(make_step(1, transfers=[(0, 3, 0)])).wait().transferred == 1


def test_transfers_need_a_pool(folder: Path) -> None:
    runner = make(folder, num_host_blocks=0)
    assert runner.host_pool is None
    with pytest.raises(StepError, match="there is no pool in host memory"):
        runner.launch(make_step(1, transfers=[(0, 1, 0)]))
    assert runner.launch(make_step(1)).wait().transferred == 1


class Event:
    """The end of a transfer."""

    def __init__(self) -> None:
        self.over, self.asked = False, threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.over


def add(pending: PendingTransfers, number: int, *events: Any, with_rows: bool = True) -> None:
    pending.add(number, list(events), with_rows)


def test_steps_with_rows_do_not_wait() -> None:
    pending, first, second = PendingTransfers(), Event(), Event()
    add(pending, 1)
    add(pending, 2, first, second)
    add(pending, 3)
    assert [pending.complete(number, wait=False) for number in (1, 2)] == [1, 1]
    second.over = True
    assert pending.complete(3, wait=False) == 1
    add(pending, 4, Event())
    first.over = True
    assert pending.complete(4, wait=False) == 3


def test_what_later_steps_have_done_is_not_told_before_its_time() -> None:
    pending, event = PendingTransfers(), Event()
    event.over = True
    add(pending, 1)
    add(pending, 2, event)
    assert [pending.complete(number, wait=False) for number in (1, 2)] == [1, 2]


def waiting(pending: PendingTransfers, number: int, event: Event) -> tuple[threading.Thread, list[int]]:
    """A thread that waits for an event of a step without rows, and what it will have found."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(pending.complete(number, wait=True)))
    thread.start()
    assert event.asked.wait(10)
    return thread, found


def test_a_step_without_rows_waits_for_all_before_it() -> None:
    pending, earlier, own = PendingTransfers(), Event(), Event()
    add(pending, 1, earlier)
    add(pending, 2, own, with_rows=False)
    add(pending, 3, with_rows=False)
    assert pending.complete(1, wait=False) == 0
    earlier.asked.clear()
    thread, found = waiting(pending, 2, earlier)
    earlier.over = True
    assert own.asked.wait(10)
    assert not found
    own.over = True
    thread.join(10)
    assert found == [2]
    assert pending.complete(3, wait=True) == 3


def test_a_step_with_rows_is_not_held_up_by_one_without() -> None:
    pending, event = PendingTransfers(), Event()
    add(pending, 1, event, with_rows=False)
    thread, found = waiting(pending, 1, event)
    add(pending, 2, with_rows=True)
    thread.join(10)
    assert found == [0]
    assert pending.complete(2, wait=False) == 0
    event.over = True
    add(pending, 3, with_rows=False)
    assert pending.complete(3, wait=True) == 3
