"""The real scheduler swaps and keeps prefixes in the real runner's host memory, and nobody's ids tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_harness import make_runner
from tiny_models import VOCABULARY

from core_engine.core import CoreConfig, EngineCore
from core_engine.host_memory import HostMemorySpec
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from gpu_worker.runner import ModelRunner
from shared.messages import Epoch, StepResult
from shared.sampling import SamplingParams

MAX_MODEL_LEN, NUM_BLOCKS, ROOMY = 128, 17, 120
NO_IDS = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def runner(tiny_models: Any) -> ModelRunner:
    folder = Path(tiny_models.folder("llama"))
    return make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=20, num_blocks_override=ROOMY, host_bytes=1 << 20)


def generate(runner: ModelRunner, num_blocks: int, **options: Any) -> tuple[list[list[int]], EngineCore]:
    """12 prompts of 20 to 86 tokens with 40 generated tokens each, twice over; the second half sampled."""
    runner.reset()
    limits = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_prefill_tokens=64, max_model_len=MAX_MODEL_LEN
    )
    core = EngineCore(CoreConfig(scheduler=limits, vocab_size=VOCABULARY, watermark=0.0, **options))
    pool = runner.host_pool
    assert pool is not None
    host = HostMemorySpec(pool.num_blocks, runner.cache.block_bytes, pool.rates) if options else None
    core.begin_epoch("worker", Epoch(1, 1), num_blocks, host)
    replica = core.replicas[0]
    requests: list[Request] = []
    outputs: list[list[int]] = []
    for _ in range(2):
        for number in range(12):
            ids = (np.arange(20 + 6 * number, dtype=np.int32) * (number % 4 + 3) + number % 4) % VOCABULARY
            params = SamplingParams(temperature=float(number >= 6), max_tokens=40, ignore_eos=True, seed=number)
            request = Request(f"r{len(requests)}", params, ids.astype(np.int32), len(requests), 0.0, frozenset())
            core.submit(request, {0: NO_IDS})
            requests.append(request)
        while (step := core.plan(replica)) is not None:
            output = runner.launch(step).wait()
            tokens = np.asarray(output.tokens, np.int32)
            result = StepResult(step.epoch, step.number, tokens, NO_IDS, transferred=output.transferred)
            core.settle(replica, result)
            replica.check()
    assert all(request.finished for request in requests)
    assert replica.kv.pool.num_references == 0
    outputs = [request.sequences[0].tokens[request.sequences[0].prompt_len :].tolist() for request in requests]
    return outputs, core


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[list[int]]:
    return generate(runner, ROOMY)[0]


@pytest.mark.parametrize("caching", [False, True])
def test_swap(runner: ModelRunner, expected: list[list[int]], caching: bool) -> None:
    outputs, core = generate(runner, NUM_BLOCKS, swap_space=1.0, preemption_mode="swap", enable_prefix_caching=caching)
    assert core.metrics.swaps.value > 0
    assert core.metrics.blocks_to_device.value > 0
    assert outputs == expected


def test_tier(runner: ModelRunner, expected: list[list[int]]) -> None:
    outputs, core = generate(runner, NUM_BLOCKS, kv_offloading_size=1.0)
    assert core.metrics.blocks_to_host.value > 0
    assert outputs == expected
