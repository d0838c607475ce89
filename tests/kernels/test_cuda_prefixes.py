"""Requests with one system prompt under the real scheduler: its pass gives the ids of the CPU's runner."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import make_runner, worker_config
from tiny_models import VOCABULARY, TinyModels

from core_engine.core import CoreConfig, EngineCore
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from gpu_worker import kernels
from gpu_worker.attention.base import AttentionShape
from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.cuda_runner import CudaRunner
from gpu_worker.kv_cache import KVCache
from gpu_worker.loading.load_model import load_model
from gpu_worker.loading.open_weights import open_weights
from gpu_worker.shared_prefix import SharingLimits
from shared.messages import Epoch, Step, StepResult
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

MAX_MODEL_LEN, MAX_SEQS, NUM_SLOTS, NUM_BLOCKS, BATCHED_TOKENS = 192, 3, 5, 40, 64
SYSTEM = [(53 * index) % 300 + 20 for index in range(135)]
NO_IDS = np.empty(0, np.int32)


def cuda_runner(folder: Path, device: torch.device, *, graphs: bool) -> CudaRunner:
    source = local_source(folder, str(folder))
    config, shape = worker_config(folder), load_model_config(source)
    attention = TritonPagedAttention(
        AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, config.block_size),
        device,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        max_rows=NUM_SLOTS,
        max_context=MAX_MODEL_LEN,
    )
    model = load_model(shape, open_weights(source, shape, "auto", 0), attention, torch.float32, device, False)
    return CudaRunner(
        shape,
        model,
        attention,
        KVCache(shape.num_layers, attention, torch.float32, device, 0, NUM_BLOCKS),
        block_size=config.block_size,
        num_slots=NUM_SLOTS,
        max_model_len=MAX_MODEL_LEN,
        graphs=graphs,
        sharing=SharingLimits(members=2, tokens=64, saved=1),
    )


def make_requests() -> list[Request]:
    """Three with the system prompt and one without, which end at different times."""
    requests, order = [], itertools.count()
    for index, (length, output) in enumerate([(2, 6), (5, 4), (0, 2), (1, 3)]):
        own = [(37 * token + 11 * index) % 300 + 20 for token in range(length)]
        prompt = [91, 92, *own] if index == 2 else SYSTEM + own
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        requests.append(Request(f"r{index}", params, np.array(prompt, np.int32), next(order), 0.0, frozenset()))
    return requests


def generate(runner: Any) -> tuple[list[list[int]], list[tuple[bool, bool]]]:
    """The ids of each request; and of each step whether it had prefills, and whether decode rows shared a pass."""
    scheduler = SchedulerConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_prefill_tokens=BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    core = EngineCore(CoreConfig(scheduler=scheduler, vocab_size=VOCABULARY))
    core.begin_epoch("worker", Epoch(1, 1), NUM_BLOCKS)
    replica, requests = core.replicas[0], make_requests()
    waiting = deque(requests)
    core.submit(waiting.popleft(), {0: NO_IDS})
    outputs: dict[str, list[int]] = {request.rid: [] for request in requests}
    window: deque[tuple[Step, Any]] = deque()
    kinds = []
    while not all(request.finished for request in requests) or window:
        while (step := core.plan(replica)) is not None:
            window.append((step, runner.launch(step)))
            kinds.append((bool(len(step.prefill)), isinstance(runner, CudaRunner) and runner.state.has_groups))
        step, launched = window.popleft()
        output = launched.wait()
        settled = core.settle(replica, StepResult(step.epoch, step.number, output.tokens, NO_IDS, output.logprobs))
        for sequence, token in zip(settled.sequences, settled.tokens.tolist(), strict=True):
            outputs[sequence.request.rid].append(token)
        while waiting and outputs["r0"]:
            # The system prompt of the first one is in the prefix cache now.
            core.submit(waiting.popleft(), {0: NO_IDS})
    return list(outputs.values()), kinds


@pytest.mark.parametrize("graphs", [True, False])
def test_ids_are_those_of_the_cpu(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    folder = tiny_models.folder("qwen3")
    expected, _ = generate(make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=NUM_SLOTS))
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    found, kinds = generate(cuda_runner(folder, device, graphs=graphs))
    assert found == expected
    assert {(False, False), (False, True), (True, False), (True, True)} == set(kinds)
