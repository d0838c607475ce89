"""KV blocks that go to host memory and come back to other places of the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import Harness, make_runner, make_step, worker_config
from scripted_engine import PROMPT as SHORT
from scripted_engine import ScriptedEngine
from tiny_models import ARCHITECTURES, VOCABULARY, TinyModels

from gpu_worker import host_memory, host_pool
from gpu_worker.build import with_other_cache
from gpu_worker.host_memory import HostMemory
from gpu_worker.runner import ModelRunner
from gpu_worker.step_checks import StepError
from shared.errors import StartupError
from shared.messages import StepResult, WorkerFailed

PROMPT = random.Random(3).choices(range(5, VOCABULARY), k=53)
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
"""Of the tiny models in float32."""
HOST_BLOCKS = 9
POOL: dict[str, Any] = {"host_bytes": HOST_BLOCKS * BLOCK_BYTES + 100}


@pytest.fixture
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.folder("llama")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder, **POOL)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moved_blocks_are_as_good_as_those_that_stayed(tiny_models: TinyModels, architecture: str, dtype: str) -> None:
    folder = tiny_models.folder(architecture)
    stayed, moved = (make_runner(folder, kv_cache_dtype=dtype, **POOL) for _ in range(2))
    expected, logits = Harness(stayed).continued(PROMPT, 12, moved=False)
    found, others = Harness(moved).continued(PROMPT, 12, moved=True)
    assert found == expected
    assert torch.equal(torch.cat(others), torch.cat(logits))


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_block_sizes(folder: Path, block_size: int) -> None:
    stayed = make_runner(folder, block_size=block_size)
    moved = make_runner(folder, block_size=block_size, host_bytes=64 * BLOCK_BYTES)
    expected = Harness(stayed).continued(PROMPT, 5, moved=False)[0]
    assert Harness(moved).continued(PROMPT, 5, moved=True)[0] == expected


def test_both_directions_in_one_step(runner: ModelRunner) -> None:
    cache, pool = runner.cache.tensor, runner.host_pool
    assert pool is not None
    cache.copy_(torch.rand(cache.shape))
    pool.tensor.copy_(torch.rand(pool.tensor.shape))
    before, host_before = cache.clone(), pool.tensor.clone()
    output = runner.launch(make_step(1, transfers=[(0, 3, 8), (1, 5, 0), (0, 3, 7), (1, 9, 2)])).wait()
    assert (output.tokens.tolist(), output.transferred) == ([], 1)
    assert torch.equal(pool.tensor[8], before[:, 3])
    assert torch.equal(pool.tensor[7], before[:, 3])
    assert torch.equal(cache[:, 5], host_before[0])
    assert torch.equal(cache[:, 9], host_before[2])
    changed = (cache != before).flatten(2).any(2)
    assert changed.nonzero()[:, 1].unique().tolist() == [5, 9]
    assert torch.equal(pool.tensor[:7], host_before[:7])


def test_steps_without_rows(runner: ModelRunner) -> None:
    harness = Harness(runner)
    harness.start({0: SHORT})
    for number in (2, 3):
        assert harness.step() == []
        assert harness.output is not None
        assert harness.output.transferred == number
    assert len(harness.decode([0], len(SHORT) + 2)) == 1
    assert harness.output.transferred == 4


BAD_TRANSFERS: dict[str, tuple[dict[str, Any], str]] = {
    "direction": ({"transfers": [(2, 1, 0)]}, "direction of a transfer 2 is not in 0..1"),
    "null block": ({"transfers": [(0, 0, 0)]}, "transferred block 0 is not in 1..199"),
    "block": ({"transfers": [(1, 200, 0)]}, "transferred block 200 is not in 1..199"),
    "host block": ({"transfers": [(1, 1, 9)]}, "transferred block of the host 9 is not in 0..8"),
    "negative": ({"transfers": [(0, 1, -1)]}, "transferred block of the host -1"),
    "two out": ({"transfers": [(0, 1, 3), (0, 2, 3)]}, "two transfers write one block of the host"),
    "two in": ({"transfers": [(1, 1, 3), (1, 1, 4)]}, "two transfers write one block"),
    "out and in": (
        {"transfers": [(0, 1, 3), (1, 2, 3)]},
        "a transfer writes what another one reads: block of the host 3",
    ),
    "in and out": ({"transfers": [(1, 2, 3), (0, 2, 4)]}, "a transfer writes what another one reads: block 2"),
    "used": ({"transfers": [(1, 7, 3)], "blocks": [(0, 7)]}, "a step uses what a transfer of its own writes: block 7"),
    "copied": ({"transfers": [(1, 7, 3)], "copies": [(7, 8)]}, "a step uses what a transfer of its own writes"),
}


@pytest.mark.parametrize("name", BAD_TRANSFERS)
def test_a_bad_transfer_is_named_and_changes_nothing(runner: ModelRunner, name: str) -> None:
    parts, words = BAD_TRANSFERS[name]
    harness = Harness(runner)
    harness.start({0: SHORT})
    assert runner.host_pool is not None
    before, host_before = runner.cache.tensor.clone(), runner.host_pool.tensor.clone()
    with pytest.raises(StepError) as caught:
        runner.launch(make_step(2, **parts))
    assert words in str(caught.value)
    assert torch.equal(runner.cache.tensor, before)
    assert torch.equal(runner.host_pool.tensor, host_before)


def test_transfers_need_a_pool(folder: Path) -> None:
    runner = make_runner(folder)
    assert runner.host_pool is None
    with pytest.raises(StepError, match="there is no pool in host memory"):
        runner.launch(make_step(1, transfers=[(0, 1, 0)]))
    assert runner.launch(make_step(1)).wait().transferred == 1


def test_another_pool_for_the_same_model(folder: Path, runner: ModelRunner) -> None:
    old = runner.host_pool
    assert old is not None
    config = worker_config(folder, host_bytes=3 * BLOCK_BYTES)
    other: Any = with_other_cache(runner, config)
    assert other.host_pool.num_blocks == 3
    assert old.tensor.numel() == 0
    assert other.launch(make_step(1, transfers=[(0, 1, 2)])).wait().transferred == 1


# -- the memory ------------------------------------------------------------------------------------------------------


def test_size_and_rates(runner: ModelRunner) -> None:
    pool = runner.host_pool
    assert pool is not None
    assert pool.num_blocks == HOST_BLOCKS
    assert pool.tensor.shape == (HOST_BLOCKS, 3, *runner.cache.tensor.shape[2:])
    assert min(pool.rates) > 0
    assert not pool.tensor.any()
    assert not runner.cache.tensor.any()


def test_a_measurement_leaves_the_cache_as_it_was(runner: ModelRunner) -> None:
    runner.cache.tensor.copy_(torch.rand(runner.cache.tensor.shape))
    before, pool = runner.cache.tensor.clone(), runner.host_pool
    assert pool is not None
    seen: list[np.ndarray] = []

    def seconds_of(transfers: np.ndarray) -> float:
        seen.append(transfers)
        pool.copy(runner.cache, transfers)
        return 0.5 if transfers[0, 0] == 0 else 0.25

    size = HOST_BLOCKS * BLOCK_BYTES
    assert host_pool.measure_rates(seconds_of, runner.cache, pool) == (2 * size, 4 * size)
    assert torch.equal(runner.cache.tensor, before)
    assert {int(each[:, 1].min()) for each in seen} == {1}, "not the null block"


@pytest.mark.parametrize(
    ("size", "words"),
    [(BLOCK_BYTES - 1, f"one KV block takes {BLOCK_BYTES}"), (2**50, r"1048576\.0 GiB .*but .* GiB are available")],
)
def test_a_pool_that_cannot_be(folder: Path, size: int, words: str) -> None:
    with pytest.raises(StartupError, match=f"--swap-space and --kv-offloading-size.*{words}"):
        make_runner(folder, host_bytes=size)


def test_a_pool_that_the_system_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "available", lambda: None)
    with pytest.raises(StartupError, match=r"--swap-space and --kv-offloading-size.*which the system refuses"):
        make_runner(folder, host_bytes=2**60)


def test_what_is_available_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    assert host_memory.available() == 1000
    for name, text in (("max", "700\n"), ("current", "500\n"), ("stat", "anon 1\ninactive_file 60\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_memory.available() == 260
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available() == 1000
    monkeypatch.setattr(host_memory, "available_memory", lambda: 0)
    assert host_memory.available() is None


class Runtime:
    """CUDA's, as far as memory is locked."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, list[tuple[Any, ...]]()

    def cudaHostRegister(self, *args: int) -> int:
        self.calls.append(args)
        return self.code

    def cudaHostUnregister(self, *args: int) -> int:
        self.calls.append(args)
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def test_locked_memory_is_unlocked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(3 * 2**20 + 7, locked=True)
    address = memory.bytes.data_ptr()
    assert memory.bytes.shape == (3 * 2**20 + 7,)
    assert not memory.bytes.any()
    assert runtime.calls == [(address, 3 * 2**20 + 7, 1)]
    memory.close()
    memory.close()
    assert runtime.calls[1:] == [(address,)]
    other = HostMemory(4096, locked=True)
    address = other.bytes.data_ptr()
    del other
    assert runtime.calls[-1] == (address,)


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(RuntimeError, match="cudaHostRegister: out of memory"):
        HostMemory(4096, locked=True)


# -- the process -----------------------------------------------------------------------------------------------------


def test_over_the_links(engine: ScriptedEngine, folder: Path) -> None:
    config = worker_config(folder, **POOL)
    ready = engine.begin(1, config)
    assert ready.num_host_blocks == HOST_BLOCKS
    assert min(ready.transfer_rates) > 0
    engine.start_request(1)
    engine.send(2, 1, decode=[0], sample=[(0, 0)], transfers=[(0, 1, 4)])
    engine.send(3, 1, transfers=[(1, 9, 4)])
    for number, count in ((1, 1), (2, 1), (3, 0)):
        _, result = engine.expect(StepResult)
        assert (result.number, len(result.tokens), result.transferred) == (number, count, number)
    engine.send(4, 1, transfers=[(1, 0, 4)])
    _, failed = engine.expect(WorkerFailed)
    assert (failed.number, failed.on_the_way) == (4, False)
    assert "transferred block 0 is not in 1..199" in failed.reason
    without = engine.begin(2, worker_config(folder))
    assert (without.num_host_blocks, without.transfer_rates) == (0, (0.0, 0.0))
    engine.send(1, 2, transfers=[(0, 1, 4)])
    _, failed = engine.expect(WorkerFailed)
    assert "there is no pool in host memory" in failed.reason
    assert engine.close() == 0
