"""``--batch-invariant``: a thousand mixed requests, joining and leaving, each give the same bits as alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from cuda_harness import HALF, ON_GPU, Answer, Job, Stack, make_cuda_runner
from tiny_models import VOCABULARY, TinyModels

from shared.logprobs import unpack
from shared.messages import FinishReason
from shared.sampling import SamplingParams

REQUESTS = 1000 if ON_GPU else 8
LONGEST_PROMPT, LONGEST_OUTPUT = (300, 64) if ON_GPU else (40, 12)
MAX_NUM_SEQS = 32 if ON_GPU else 4
MAX_MODEL_LEN = 384 if ON_GPU else 64
NUM_BLOCKS, SMALL_POOL = (1100, 60) if ON_GPU else (40, 6)
WIDE = {"hidden_size": 256, "intermediate_size": 768}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.9, "logit_bias": [(30, 4.0), (31, -9.0)], "min_tokens": 1},
]


def ids(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(5, VOCABULARY), k=count)


def make_jobs(seed: int) -> list[Job]:
    """Prompts of 1 to ``LONGEST_PROMPT`` ids, a third of them with one of three beginnings; outputs of 1 to
    ``LONGEST_OUTPUT``; one in nine is aborted."""
    draw = random.Random(seed)
    beginnings = [ids(draw, LONGEST_PROMPT // part) for part in (2, 4, 6)]
    jobs = []
    for index in range(REQUESTS):
        length = draw.randint(1, LONGEST_PROMPT if index % 3 == 0 else LONGEST_PROMPT // 6)
        prompt = (draw.choice(beginnings) if index % 3 == 1 else []) + ids(draw, length)
        most = min(LONGEST_OUTPUT, 1 + int(draw.expovariate(4 / LONGEST_OUTPUT)))
        params = SamplingParams(
            max_tokens=most,
            seed=draw.choice([None, index, -index]),
            ignore_eos=True,
            stop_token_ids=ids(draw, 8) if index % 5 == 0 else [],
            **KINDS[index % len(KINDS)],
        )
        params.validate(VOCABULARY)
        abort_at = draw.randint(1, most) if index % 9 == 4 else None
        jobs.append(Job(prompt, params, draw.randrange(REQUESTS // 2), abort_at))
    return jobs


def chosen(records: list[bytes]) -> list[float]:
    """The log-probabilities of the tokens themselves."""
    return [unpack(record).token.logprob for record in records]


def check(jobs: list[Job], found: list[Answer], alone: list[Answer]) -> None:
    for index, (job, answer, expected) in enumerate(zip(jobs, found, alone, strict=True)):
        count = len(answer.ids) if answer.reason is FinishReason.ABORT else len(expected.ids)
        assert answer.ids == expected.ids[:count], f"request {index}: {job.params}"
        records = expected.records[:count]
        if ON_GPU:
            assert answer.records == records, f"request {index}: log-probabilities"
        else:
            # The interpreter multiplies with numpy, where a row's sums depend on its place on some processors.
            assert chosen(answer.records) == pytest.approx(chosen(records), abs=1e-3), f"request {index}"
        assert answer.reason in (expected.reason, FinishReason.ABORT)
        assert job.abort_at is not None or answer.reason is expected.reason


def test_a_thousand_requests(tiny_models: TinyModels) -> None:
    # Wide enough for products whose inner dimension is divided among programs.
    folder = tiny_models.folder("qwen3", **(WIDE if ON_GPU else {}))
    options: dict[str, Any] = {
        "num_slots": MAX_NUM_SEQS + 2,
        "max_model_len": MAX_MODEL_LEN,
        "dtype": HALF,
        "batch_invariant": True,
    }
    runner = make_cuda_runner(folder, num_blocks=NUM_BLOCKS, **options)
    jobs = make_jobs(11)
    undisturbed = [dataclasses.replace(job, arrives=0, abort_at=None) for job in jobs]
    alone = Stack(runner, max_num_seqs=1, budget=512, watched=False).run(undisturbed)
    assert not ON_GPU or {answer.reason for answer in alone} == {FinishReason.LENGTH, FinishReason.STOP}

    together = Stack(runner, max_num_seqs=MAX_NUM_SEQS, budget=256 if ON_GPU else 24)
    check(jobs, together.run(jobs), alone)
    assert max(together.decode_rows) > MAX_NUM_SEQS // 2

    small = make_cuda_runner(folder, num_blocks=SMALL_POOL, **options)
    resting = [
        dataclasses.replace(job, rest_at=job.params.max_tokens // 2 if index % 7 == 0 else None)
        for index, job in enumerate(jobs)
    ]
    pressed = Stack(small, max_num_seqs=MAX_NUM_SEQS, budget=200 if ON_GPU else 24, caching=True)
    found = pressed.run(resting)
    check(jobs, found, alone)
    assert sum(answer.preemptions for answer in found) > len(jobs) // 20
    # The interpreter's few requests have no beginning in common that stays in so small a cache.
    assert not ON_GPU or pressed.metric("vllm:prefix_cache_hits_total") > 0


@pytest.mark.parametrize("graphs", [True, False])
def test_padding_changes_no_bit(tiny_models: TinyModels, graphs: bool) -> None:
    """Log-probabilities are the same bits at every size of a step."""
    batch = 70 if ON_GPU else 3
    runner = make_cuda_runner(
        tiny_models.folder("llama"),
        num_slots=batch + 4,
        num_blocks=5 * batch,
        max_model_len=64,
        dtype=HALF,
        batch_invariant=True,
        graphs=graphs,
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=20)
    draw = random.Random(5)
    jobs = [Job(ids(draw, 1 + 5 * index % 30), params) for index in range(batch)]
    alone = Stack(runner, max_num_seqs=1, depth=1, watched=False).run(jobs)
    for some in (2, 3, 5, 8, 17, 33, 64, batch) if ON_GPU else (2, 3):
        found = Stack(runner, max_num_seqs=some, budget=4096, watched=False).run(jobs[:some])
        check(jobs[:some], found, alone[:some])


@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (1000, 576)], ids=str)
def test_products_of_full_sizes(device: torch.device, shape: tuple[int, int]) -> None:
    """Of more tokens than have programs of their own for the parts of a sum, and of one."""
    from gpu_worker.layers.cuda_linear import CudaGatedLinear, CudaHead, CudaLinear

    generator = torch.Generator().manual_seed(2)
    shape = shape if ON_GPU else (shape[0] // 16, shape[1] // 16)
    weight = (torch.randn(shape, generator=generator) * 0.03).to(device, HALF)
    x = torch.randn(2500 if ON_GPU else 3, shape[1], generator=generator).to(device, HALF)
    for layer in (kind(weight, batch_invariant=True) for kind in (CudaLinear, CudaGatedLinear, CudaHead)):
        together = layer(x)
        for count in (1, 2, 7, 64, 65, 300, 1100) if ON_GPU else (1, 2):
            assert torch.equal(layer(x[-count:]), together[-count:]), f"{type(layer).__name__}, {count} tokens"
