"""``--kv-cache-dtype fp8``: scales reach writer and reader, and schedules change nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import HALF, ON_GPU, Job, Stack, ids_of, make_cuda_runner
from tiny_models import VOCABULARY, TinyModels, with_kv_scales

from gpu_worker.attention.base import KVScales
from shared.logprobs import unpack
from shared.sampling import SamplingParams

FLOAT8 = torch.float8_e4m3fn
GREEDY = SamplingParams(temperature=0.0, max_tokens=24 if ON_GPU else 5, ignore_eos=True)
LONGEST = 140 if ON_GPU else 20
PROMPTS = [
    [20 + (37 * index + 11 * place) % 300 for place in range(LONGEST - 19 * index % LONGEST)] for index in range(8)
]
PROMPTS = PROMPTS if ON_GPU else PROMPTS[:3]


@pytest.fixture
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.folder("qwen3")


def make(folder: Path, cache_dtype: torch.dtype | None, **options: Any) -> Any:
    known: dict[str, Any] = {"num_slots": 10, "num_blocks": 120, "max_model_len": 192, "dtype": HALF}
    return make_cuda_runner(folder, cache_dtype=cache_dtype, batch_invariant=True, **known, **options)


def mean_logprob(runner: Any, prompts: list[list[int]]) -> float:
    """Of the prompts' ids, in nats."""
    params = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    answers = Stack(runner, max_num_seqs=8).run([Job(prompt, params) for prompt in prompts])
    found = [unpack(record).token.logprob for answer in answers for record in answer.prompt_records]
    assert len(found) == sum(len(prompt) - 1 for prompt in prompts)
    return sum(found) / len(found)


def test_scales_reach_writer_and_reader(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity of what the model itself says, beside that with a cache of the model's dtype."""
    plain = make(folder, None)
    prompts = [
        prompt + answer.ids
        for prompt, answer in zip(
            PROMPTS, Stack(plain, max_num_seqs=8).run([Job(p, GREEDY) for p in PROMPTS]), strict=True
        )
    ]
    expected = mean_logprob(plain, prompts)
    scaled = with_kv_scales(folder, tmp_path / "scaled", {"k_scale": torch.tensor(4.0), "v_scale": torch.tensor(2.0)})
    for runner in (make(folder, FLOAT8), make(scaled, FLOAT8)):
        assert runner.cache.tensor.element_size() == 1
        assert abs(mean_logprob(runner, prompts) - expected) < 0.02 * abs(expected)
    attend = runner.backend.attend
    monkeypatch.setattr(runner.backend, "attend", lambda *args: attend(*args[:-1], KVScales(1.0, 1.0)))
    assert abs(mean_logprob(runner, prompts) - expected) > 0.1 * abs(expected)


def test_hits_chunks_and_preemptions_change_nothing(folder: Path) -> None:
    runner = make(folder, FLOAT8)
    jobs = [Job(prompt, GREEDY, arrives=3 * index) for index, prompt in enumerate([*PROMPTS, *PROMPTS[:2]])]
    expected = ids_of(Stack(runner, max_num_seqs=1).run(jobs))
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    assert ids_of(Stack(runner, max_num_seqs=8, budget=40 if ON_GPU else 16).run(jobs)) == expected
    resting = [dataclasses.replace(job, rest_at=1 + index % 3) for index, job in enumerate(jobs)]
    cached = Stack(runner, max_num_seqs=8, budget=40 if ON_GPU else 16, caching=True)
    found = cached.run(resting)
    assert ids_of(found) == expected
    assert any(answer.preemptions for answer in found)
    assert cached.metric("vllm:prefix_cache_hits_total") > 0
    assert max(max(ids) for ids in expected) < VOCABULARY
    assert math.isfinite(mean_logprob(runner, PROMPTS))
