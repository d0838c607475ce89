"""The runner of the GPU under the real scheduler: graphs, staged steps and kernels give the ids of the CPU's runner."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import make_runner, worker_config
from tiny_models import ARCHITECTURES, VOCABULARY, TinyModels, with_kv_scales

from core_engine.core import CoreConfig, EngineCore
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from gpu_worker import cuda_graphs, cuda_mixed, kernels
from gpu_worker.attention.base import AttentionShape
from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.cuda_mixed import MixedShape
from gpu_worker.cuda_runner import CudaRunner
from gpu_worker.host_copies import Returned
from gpu_worker.kv_cache import KVCache
from gpu_worker.loading.load_model import load_model
from gpu_worker.loading.open_weights import open_weights
from shared.messages import Epoch, Step, StepResult
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

ON_GPU = torch.cuda.is_available()
OUTPUT = 24 if ON_GPU else 5
MAX_MODEL_LEN, NUM_SLOTS, NUM_BLOCKS = 96, 6, 24
NO_IDS = np.empty(0, np.int32)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=3),
    SamplingParams(
        temperature=1.0, seed=7, top_k=20, top_p=0.9, repetition_penalty=1.2, max_tokens=OUTPUT, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=1),
]


def cuda_runner(
    folder: Path, device: torch.device, *, graphs: bool = True, cache_dtype: torch.dtype = torch.float32
) -> CudaRunner:
    source = local_source(folder, str(folder))
    config, shape = worker_config(folder), load_model_config(source)
    attention = TritonPagedAttention(
        AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, config.block_size),
        device,
        cache_dtype=cache_dtype,
        dtype=torch.float32,
        max_rows=8,
        max_context=MAX_MODEL_LEN,
    )
    weights = open_weights(source, shape, "auto", 0)
    model = load_model(shape, weights, attention, torch.float32, device, False, cache_dtype)
    cache = KVCache(shape.num_layers, attention, cache_dtype, device, 0, NUM_BLOCKS)
    return CudaRunner(
        shape,
        model,
        attention,
        cache,
        block_size=config.block_size,
        num_slots=NUM_SLOTS,
        max_model_len=MAX_MODEL_LEN,
        graphs=graphs,
    )


def generate(runner: Any, prompts: list[list[int]], depth: int) -> tuple[list[list[int]], list[list[bytes]]]:
    """The ids of each prompt and the records of its tokens; ``depth`` steps are planned ahead."""
    scheduler = SchedulerConfig(
        max_num_seqs=NUM_SLOTS - 2, max_num_batched_tokens=24, max_prefill_tokens=24, max_model_len=MAX_MODEL_LEN
    )
    core = EngineCore(CoreConfig(scheduler=scheduler, vocab_size=VOCABULARY, steps_in_flight=depth))
    core.begin_epoch("worker", Epoch(1, 1), NUM_BLOCKS)
    replica, order = core.replicas[0], itertools.count()
    requests = [
        Request(f"r{index}", PARAMS[index % len(PARAMS)], np.array(prompt, np.int32), next(order), 0.0, frozenset())
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.submit(request, {0: NO_IDS})
    outputs: dict[str, list[int]] = {request.rid: [] for request in requests}
    records: dict[str, list[bytes]] = {request.rid: [] for request in requests}
    window: deque[tuple[Step, Any]] = deque()
    while not all(request.finished for request in requests) or window:
        while (step := core.plan(replica)) is not None:
            window.append((step, runner.launch(step)))
        step, launched = window.popleft()
        output = launched.wait()
        result = StepResult(
            step.epoch, step.number, output.tokens, NO_IDS, output.logprobs, prompt_logprobs=output.prompt_logprobs
        )
        settled = core.settle(replica, result)
        for sequence, token in zip(settled.sequences, settled.tokens.tolist(), strict=True):
            outputs[sequence.request.rid].append(token)
        for index, record in settled.records:
            records[settled.sequences[index].request.rid].append(record)
    return list(outputs.values()), list(records.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("depth", [1, 2])
def test_ids_are_those_of_the_cpu(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch, architecture: str, depth: int
) -> None:
    if not ON_GPU and (architecture != "qwen3" or depth == 1):
        pytest.skip("the interpreter takes a minute for each")
    folder = tiny_models.folder(architecture)
    prompts = [[(37 * index + 11 * salt) % 300 + 20 for index in range(3 + 7 * salt)] for salt in range(5)]
    expected = generate(make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=NUM_SLOTS), prompts, depth)
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    for graphs in (True, False):
        found = generate(cuda_runner(folder, device, graphs=graphs), prompts, depth)
        assert found[0] == expected[0]
        assert [len(each) for each in found[1]] == [len(each) for each in expected[1]]


def recorded_logits(runner: Any) -> list[torch.Tensor]:
    """The list that the first row of all logits is added to, also of those that a kernel is compiled with."""
    found, project = [], runner.model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = project(hidden)
        found.append(logits[0].float().cpu())
        return logits

    runner.model.logits = record
    return found


def test_logits_with_a_float8_cache_are_near_those_of_the_cpu(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Near, since a number at the middle of two of float8 may become either; a scale that is lost changes them all."""
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(4.0)}
    folder = with_kv_scales(tiny_models.folder("qwen3"), tmp_path / "scaled", scales)
    runner: Any = make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=NUM_SLOTS, kv_cache_dtype="fp8")
    expected = recorded_logits(runner)
    prompts = [[(37 * index) % 300 + 20 for index in range(31)]]
    generate(runner, prompts, 2)
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    runner = cuda_runner(folder, device, graphs=False, cache_dtype=torch.float8_e4m3fn)
    found = recorded_logits(runner)
    generate(runner, prompts, 2)
    assert len(expected) == OUTPUT
    for logits in expected[:4]:
        assert min((each - logits).norm() for each in found) < 0.05 * logits.norm()


def test_another_cache_is_used_by_steps_of_known_shapes(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    folder = tiny_models.folder("llama")
    runner = cuda_runner(folder, device)
    prompts = [[40, 41, 42, 43, 44]]
    before, _ = generate(runner, prompts, 2)
    old = runner.cache
    runner.use_cache(KVCache(runner.config.num_layers, runner.backend, torch.float32, device, 0, NUM_BLOCKS))
    old.tensor.fill_(float("nan"))
    after, _ = generate(runner, prompts, 2)
    assert after == before
    assert runner.cache.tensor.abs().sum() > 0


def test_graphs_made_ahead_change_no_request(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    runner = cuda_runner(tiny_models.folder(ARCHITECTURES[0]), device)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    expected = generate(runner, prompts, 2)[0]
    runner.reset()
    mixed = list(itertools.islice(cuda_mixed.shapes_ahead(runner._mixed_cut, runner.sizes[-1]), 1))
    if not ON_GPU:
        # Elsewhere nothing is captured, and steps with prefills are slow.
        runner._ahead += [(shape, False, "plain") for shape in mixed]
    while runner.prepare():
        pass
    wanted = {(size, False, variant) for size in runner.sizes for variant in ("plain", "full")}
    # Of these there are graphs if they gain from one, which is measured.
    tried = {(shape, False, "plain") for shape in mixed}
    assert wanted | tried <= runner._samples.keys()
    if ON_GPU:
        assert all(shape in runner._graphs for shape in wanted)
    assert generate(runner, prompts, 2)[0] == expected
    assert not runner.prepare()


def test_no_memory_for_graphs_ahead(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    runner = cuda_runner(tiny_models.folder(ARCHITECTURES[0]), device)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(runner, "_prepare", fails)
    assert not runner.prepare()
    assert not runner.prepare()


def test_no_memory_for_the_graph_of_a_step(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step and those behind it are launched kernel by kernel."""
    folder, prompts = tiny_models.folder(ARCHITECTURES[0]), [[5, 6, 7], [8, 9, 10, 11]]
    expected = generate(cuda_runner(folder, device, graphs=False), prompts, 2)[0]
    runner = cuda_runner(folder, device)
    attempts = []

    def fails(key: Any, _: Any) -> None:
        attempts.append(key)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(runner._graphs, "_captures", True)
    monkeypatch.setattr(runner._graphs, "_capture", fails)
    runner._graphs._is_worth.update({(size, False, "plain"): True for size in runner.sizes})
    assert generate(runner, prompts, 2)[0] == expected
    assert len(attempts) == 1
    assert not runner._graphs.is_worth(attempts[0])


def test_decode_steps_get_graphs_on_any_host(tiny_models: TinyModels, device: torch.device) -> None:
    """However long the first one took: a busy host launches so slowly that the device seems to compute for long."""
    runner = cuda_runner(tiny_models.folder(ARCHITECTURES[0]), device)
    runner._graphs._launch_s = 0.0
    generate(runner, [[5, 6, 7], [8, 9, 10, 11]], 2)
    decoded = [key for key in runner._graphs._is_worth if isinstance(key[0], int)]
    assert decoded
    assert all(runner._graphs.is_worth(key) for key in decoded)


def test_a_step_with_prefills_waits_for_no_capture(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched first, its results are on their way, and the next one of its shape is replayed."""
    folder, prompts = tiny_models.folder(ARCHITECTURES[0]), [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    expected = generate(cuda_runner(folder, device, graphs=False), prompts, 1)[0]
    runner = cuda_runner(folder, device)
    events: list[Any] = []
    send = runner._returns.send

    class Graph:
        def __init__(self, launch: Callable[[], None]) -> None:
            self._launch = launch

        def replay(self) -> None:
            events.append("replayed")
            self._launch()

    def capture(key: Any, launch: Callable[[], None]) -> Graph:
        events.append(key[0])
        return Graph(launch)

    def sent(tensors: list[torch.Tensor]) -> Returned:
        events.append("sent")
        return send(tensors)

    monkeypatch.setattr(cuda_graphs, "LAUNCH_BOUND", math.inf)
    monkeypatch.setattr(runner._graphs, "_captures", True)
    monkeypatch.setattr(runner._graphs, "_capture", capture)
    monkeypatch.setattr(runner._returns, "send", sent)
    ids = []
    for _ in range(3):
        ids.append(generate(runner, prompts, 1)[0])
        runner.reset()
        events.append("again")
    assert ids == [expected] * 3
    mixed = [index for index, event in enumerate(events) if isinstance(event, MixedShape)]
    assert mixed
    for index in mixed:
        assert events[index - 1] == "sent"
        assert events[index - 2] != "replayed"
    rows = [index for index, event in enumerate(events) if isinstance(event, int)]
    assert rows
    assert {events[index + 1] for index in rows} == {"replayed"}
    first = next(index for index, event in enumerate(events) if event == "again")
    assert "replayed" in events[first:]
