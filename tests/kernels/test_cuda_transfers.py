"""Transfers under the GPU's runner, and which of them are known to be complete. ``tests/gpu`` has more."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_harness import make_cuda_runner
from runner_harness import Harness, make_runner, make_step
from tiny_models import TinyModels

from gpu_worker import cuda_transfers
from gpu_worker.cuda_transfers import (
    PIECE_BYTES,
    PIECES,
    CudaTransfers,
    PendingTransfers,
    Transfers,
    bytes_of_pieces,
    copy_runs,
)
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


@pytest.mark.parametrize("count", [1, 2, 5, 9], ids=lambda count: f"{count} blocks")
@pytest.mark.parametrize("blocks_of_a_piece", [0.5, 1, 2.5, 4, 100])
def test_pieces(folder: Path, count: int, blocks_of_a_piece: float) -> None:
    """Blocks there and back to other places, by pieces that hold fewer of them, one, or more."""
    runner = make(folder, num_blocks=24, num_host_blocks=12, cache_dtype=torch.float8_e4m3fn)
    cache, host = runner.cache.tensor.view(torch.uint8), runner.host_pool.tensor.view(torch.uint8)
    generator = np.random.default_rng(count)
    for tensor in (cache, host):
        tensor.copy_(torch.from_numpy(generator.integers(0, 256, tensor.shape, np.uint8)))
    before, host_before = cache.cpu().clone(), host.clone()
    transfers = CudaTransfers(runner.cache, runner.host_pool, round(blocks_of_a_piece * runner.cache.block_bytes))
    sources, targets = generator.permutation(np.arange(1, 24))[: 2 * count].reshape(2, count)
    hosts = generator.permutation(12)[:count]
    for number, direction, blocks in ((1, 0, sources), (2, 1, targets)):
        step = make_step(number, transfers=[(direction, *pair) for pair in zip(blocks, hosts, strict=True)])
        assert transfers.start(step)() == number
    host_before[hosts] = before[:, sources].transpose(0, 1)
    before[:, targets] = before[:, sources]
    assert torch.equal(host, host_before)
    assert torch.equal(cache.cpu(), before)


@pytest.mark.parametrize("to_host", [True, False], ids=["to the host", "to the device"])
@pytest.mark.parametrize(
    ("hosts", "most", "copied"),
    [
        ([4], 9, [1]),
        ([0, 1, 2, 3], 9, [4]),
        ([0, 1, 2, 3, 4], 2, [2, 2, 1]),
        ([1, 2, 4, 7, 8, 9], 9, [2, 1, 3]),
        ([0, 2, 4, 9], 9, [1, 1, 1, 1]),
        ([5, 6, 8, 9], 1, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_neighbours_are_copied_together(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], most: int, copied: list[int], to_host: bool
) -> None:
    host, piece = (
        torch.arange(first, first + 6 * blocks, dtype=torch.int32).view(blocks, 2, 3)
        for first, blocks in ((0, 10), (1000, len(hosts)))
    )
    expected = [host.clone(), piece.clone()]
    if to_host:
        expected[0][hosts] = piece
    else:
        expected[1].copy_(host[hosts])
    seen: list[int] = []
    copy = torch._foreach_copy_

    def watched(targets: Any, sources: Any, **options: Any) -> None:
        seen.extend(map(len, targets))
        copy(targets, sources, **options)

    monkeypatch.setattr(cuda_transfers.torch, "_foreach_copy_", watched)
    copy_runs(host, hosts, piece, to_host, most)
    assert torch.equal(host, expected[0])
    assert torch.equal(piece, expected[1])
    assert seen == copied


def test_room_for_pieces() -> None:
    assert bytes_of_pieces(2**21) == 2 * PIECES * PIECE_BYTES
    assert bytes_of_pieces(2**26) == 2 * PIECES * 2**26


def test_transfers_that_are_not_launched_yet_or_fail() -> None:
    launch: Future[Any] = Future()
    transfers, event = Transfers(launch), Event()
    assert not transfers.query()
    assert not event.asked.is_set()
    launch.set_result(event)
    assert not transfers.query()
    event.over = True
    assert transfers.query()
    failed: Future[Any] = Future()
    failed.set_exception(RuntimeError("out of memory"))
    pending = PendingTransfers()
    pending.add(1, [Transfers(failed)], True)
    with pytest.raises(RuntimeError, match="out of memory"):
        pending.complete(1, wait=False)


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
