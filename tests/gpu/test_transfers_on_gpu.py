"""KV blocks to host memory and back beside the steps of the GPU's runner: they arrive, and steps do not see them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_harness import DEVICE, HALF, ON_GPU, make_cuda_runner
from runner_harness import Harness, make_step
from tiny_models import TinyModels

from gpu_worker.cuda_transfers import CudaTransfers
from gpu_worker.host_pool import HostPool, measure_rates

PROMPT = [(37 * index) % 300 + 20 for index in range(170 if ON_GPU else 35)]
COUNT = 24 if ON_GPU else 3
NUM_BLOCKS, HOST_BLOCKS = (400, 300) if ON_GPU else (24, 8)
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.folder("qwen3", **({} if ON_GPU else {"num_hidden_layers": 1}))


def make(folder: Path, **options: Any) -> Any:
    known: dict[str, Any] = {"num_slots": 4, "num_blocks": NUM_BLOCKS, "max_model_len": 512, "dtype": HALF}
    return make_cuda_runner(folder, num_host_blocks=HOST_BLOCKS, **{**known, **options})


def settle() -> None:
    """What the test itself has launched is complete: transfers wait for nothing."""
    if ON_GPU:
        torch.cuda.synchronize()


@pytest.mark.parametrize("cache_dtype", [None, FLOAT8], ids=["half", "float8"])
def test_moved_blocks_give_the_same_logits(folder: Path, cache_dtype: torch.dtype | None) -> None:
    stayed, moved = (make(folder, graphs=False, cache_dtype=cache_dtype, batch_invariant=True) for _ in range(2))
    expected, logits = Harness(stayed).continued(PROMPT, COUNT, moved=False)
    found, others = Harness(moved).continued(PROMPT, COUNT, moved=True)
    assert found == expected
    for one, other in zip(logits, others, strict=True):
        assert torch.equal(one, other)


def test_moved_blocks_give_the_same_ids_in_graphs(folder: Path) -> None:
    expected, _ = Harness(make(folder, dtype=torch.float32)).continued(PROMPT, COUNT, moved=False)
    assert Harness(make(folder, dtype=torch.float32)).continued(PROMPT, COUNT, moved=True)[0] == expected


def test_the_pool_is_locked_and_a_measurement_leaves_the_cache_as_it_was(folder: Path) -> None:
    runner = make(folder)
    pool = runner.host_pool
    assert pool.tensor.device.type == "cpu"
    assert pool.tensor.is_pinned() == ON_GPU
    before = runner.cache.tensor.clone()
    assert min(measure_rates(runner.transfers.seconds_of, runner.cache, pool)) > 0
    assert torch.equal(runner.cache.tensor.view(torch.uint8), before.view(torch.uint8))
    runner.reset()
    pool.close()
    for _ in range(3):
        HostPool(runner.config.num_layers, runner.backend, HALF, DEVICE, 2**26 if ON_GPU else 2**16).close()


def use_pieces(runner: Any, blocks: int) -> None:
    """Transfer so many blocks at a time."""
    runner.transfers = CudaTransfers(runner.cache, runner.host_pool, blocks * runner.cache.block_bytes)


@pytest.mark.parametrize("blocks_of_a_piece", [3, 1000])
def test_steps_and_transfers_do_not_see_each_other(folder: Path, blocks_of_a_piece: int) -> None:
    """Decode rows run two steps ahead of their results while blocks that are none of theirs go out and come back."""
    alone = Harness(make(folder)).generate(PROMPT, COUNT)
    runner = make(folder)
    use_pieces(runner, blocks_of_a_piece)
    harness, cache = Harness(runner), runner.cache.tensor
    first = harness.start({0: PROMPT}, room=COUNT)
    free = np.arange(harness.next_block, NUM_BLOCKS)
    half = min(len(free) // 2, HOST_BLOCKS // 2)
    sources, targets = free[:half], free[-half:]
    for block in (*sources, *targets):
        cache[:, block].copy_(torch.rand(cache[:, block].shape, device=DEVICE))
    content = cache[:, torch.from_numpy(sources).to(DEVICE)].clone()
    settle()
    out = [(0, block, host) for block, host in zip(sources, range(half), strict=True)]
    back = [(1, block, host) for block, host in zip(targets, range(half), strict=True)]
    window: deque[Any] = deque()
    ids, number, transferred, returned_at = list(first), 1, [0], None
    while len(ids) < COUNT:
        while len(window) < 2:
            number += 1
            transfers = out if number == 2 else []
            if returned_at is None and transferred[-1] >= 2:
                transfers, returned_at = back, number
            window.append(runner.launch(make_step(number, decode=[0], sample=[(0, 0)], transfers=transfers)))
        output = window.popleft().wait()
        ids += output.tokens.tolist()
        transferred.append(output.transferred)
    while window:
        transferred.append(window.popleft().wait().transferred)
    assert ids[:COUNT] == alone
    if returned_at is None:
        # So few steps may be over before their transfers are.
        returned_at = number + 2
        assert runner.launch(make_step(number + 1)).wait().transferred == number + 1
        runner.launch(make_step(returned_at, transfers=back)).wait()
        number = returned_at
    assert runner.launch(make_step(number + 1)).wait().transferred == number + 1
    assert transferred == sorted(transferred)
    assert torch.equal(cache[:, torch.from_numpy(targets).to(DEVICE)], content)


def test_graphs_are_captured_beside_transfers(folder: Path) -> None:
    """Many steps' transfers are on the way at once, in both directions, while idle moments are used."""
    runner = make(folder)
    use_pieces(runner, 2)
    cache, host = runner.cache.tensor, runner.host_pool.tensor
    half, blocks = HOST_BLOCKS // 2, np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS))
    for tensor in (cache, host):
        tensor.copy_(torch.rand(tensor.shape))
    settle()
    before, host_before = cache.cpu().clone(), host.clone()
    out, back = blocks[:half], blocks[half : 2 * half]
    steps, launched = np.array_split(np.arange(half), 4), []
    for number, part in enumerate(steps, 1):
        transfers = [row for i in part for row in ((0, out[i], i), (1, back[i], half + i))]
        launched.append(runner.launch(make_step(number, transfers=transfers)))
        runner.prepare()
    assert launched[-1].wait().transferred == len(steps)
    assert torch.equal(host[:half], before[:, out].transpose(0, 1))
    assert torch.equal(host[half:], host_before[half:])
    assert torch.equal(cache[:, torch.from_numpy(back).to(DEVICE)].cpu().transpose(0, 1), host_before[half : 2 * half])


def test_a_new_epoch_waits_for_the_transfers_of_the_last(folder: Path) -> None:
    runner = make(folder)
    cache = runner.cache.tensor
    cache.fill_(1.0)
    settle()
    count = min(NUM_BLOCKS - 1, HOST_BLOCKS)
    runner.launch(make_step(1, transfers=[(0, 1 + index, index) for index in range(count)]))
    runner.reset()
    cache.zero_()
    assert (runner.host_pool.tensor[:count] == 1.0).all()
    assert runner.launch(make_step(1)).wait().transferred == 1
