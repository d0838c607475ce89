"""What a runner does before its first request leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from runner_harness import make_runner
from structlog.testing import capture_logs
from tiny_models import TinyModels

from gpu_worker import cuda_graphs, cuda_mixed, cuda_warm_up, kernels
from gpu_worker.cuda_warm_up import FULL, Rows, capture_graphs, compile_kernels
from gpu_worker.sampling.cuda_sampler import CudaSampler
from shared import step_shapes
from tests.kernels.test_cuda_runner import MAX_MODEL_LEN, NUM_SLOTS, cuda_runner, generate


def test_a_warm_runner_gives_the_ids_of_the_cpu(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = tiny_models.folder("llama"), [[40, 41, 42, 43, 44]]
    expected = generate(make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=NUM_SLOTS), prompts, 2)
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    monkeypatch.setattr(cuda_warm_up, "BUCKETS", (1, 16))
    monkeypatch.setattr(cuda_warm_up, "COMPILED_PREFILLS", (32,))
    monkeypatch.setattr(cuda_warm_up, "CAPTURED", (Rows(decode=1), Rows(prefill=8), Rows(decode=16)))
    monkeypatch.setattr(cuda_warm_up, "CAPTURE_S", 600.0)
    # The interpreter computes while it launches.
    monkeypatch.setattr(cuda_graphs, "LAUNCH_BOUND", math.inf)
    # Small shapes: the interpreter computes padding as slowly as tokens.
    for module in (cuda_mixed, step_shapes):
        monkeypatch.setattr(module, "ROWS", (2,))
    monkeypatch.setattr(step_shapes, "GRANULES", ((0, 8),))
    sampled, sample = [], CudaSampler.sample

    def watched(sampler, logits, slots, state, variant):  # type: ignore[no-untyped-def]
        sampled.append((len(slots), variant))
        return sample(sampler, logits, slots, state, variant)

    monkeypatch.setattr(CudaSampler, "sample", watched)
    runner = cuda_runner(folder, device)
    with capture_logs() as lines:
        compile_kernels(runner, 4, with_transfers=True)
        compiled = list(sampled)
        assert runner._samples == {}
        capture_graphs(runner)
    assert not [line for line in lines if line["log_level"] == "warning"]
    assert set(compiled) == {(2 + cuda_mixed.MAX_PREFILLS, "plain"), (1, "plain"), (1, "full")}
    worth = {key for key in runner._graphs._is_worth if runner._graphs.is_worth(key)}
    assert [shape for shape, _, _ in worth if isinstance(shape, cuda_mixed.MixedShape)]
    assert (1, False, "plain") in worth
    assert not runner.state.active.any()
    assert generate(runner, prompts, 2) == expected


def test_steps_hold_what_they_are_asked_for(tiny_models: TinyModels, device: torch.device) -> None:
    runner = cuda_runner(tiny_models.folder("llama"), device)
    kinds = [Rows(prefill=200), Rows(decode=3, params=FULL), Rows(decode=1, prefill=5), Rows(decode=2, common=40)]
    steps = list(cuda_warm_up._steps(runner, kinds))
    assert [(step.prefill[:, 2].tolist(), step.decode.tolist()) for step in steps] == [
        ([95, 95, 95], []),
        ([], [0, 1, 2]),
        ([5], [1]),
        ([], [0, 1]),
    ]
    assert [step.released.tolist() for step in steps] == [[], [0, 1, 2], [0, 1, 2], [0, 1]]
    assert [[init.num_tokens for init in step.new] for step in steps] == [[95] * 3, [1] * 3, [5, 1], [41, 41]]
    assert steps[3].blocks.tolist() == [[0, 1]] * 3 + [[1, 1]] * 3
    assert not any(len(step.blocks) for step in steps[:3])
