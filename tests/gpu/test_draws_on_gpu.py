"""What a request draws depends on its seed, its choice and the position alone; the edges of parameters are greedy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from cuda_harness import HALF, ON_GPU, Answer, Job, Stack, ids_of, make_cuda_runner
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.sampling.noise import gumbel
from shared.logprobs import unpack
from shared.sampling import SamplingParams
from tests.kernels.sampling_pair import Pair, features, make_logits, make_request

OUTPUT = 16 if ON_GPU else 4
NEIGHBOURS = 30 if ON_GPU else 3
PROMPT = [40, 77, 123, 300, 18]
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=OUTPUT, ignore_eos=True)
SEEDLESS = dataclasses.replace(SEEDED, seed=None)
MODES = [pytest.param(torch.float32, False, id="float32"), pytest.param(HALF, True, id="half-batch-invariant")]


def make_runner(tiny_models: TinyModels, dtype: torch.dtype, batch_invariant: bool) -> Any:
    return make_cuda_runner(
        tiny_models.folder("qwen3"),
        num_slots=NEIGHBOURS + 6,
        num_blocks=20 * (NEIGHBOURS + 2),
        max_model_len=128,
        dtype=dtype,
        batch_invariant=batch_invariant,
    )


@pytest.mark.parametrize(("dtype", "batch_invariant"), MODES)
def test_seed_and_neighbours(tiny_models: TinyModels, dtype: torch.dtype, batch_invariant: bool) -> None:
    runner = make_runner(tiny_models, dtype, batch_invariant)

    def run(jobs: list[Job], *names: str) -> list[Answer]:
        return Stack(runner, max_num_seqs=NEIGHBOURS + 2, watched=False).run(jobs, names)

    wanted = Job(PROMPT, SEEDED)
    [expected] = ids_of(run([wanted], "first"))
    assert len(set(expected)) > OUTPUT // 4
    for name in ("a", "b", "c"):
        assert ids_of(run([wanted], name)) == [expected]
    assert ids_of(run([wanted, Job([9, 8, 7], SEEDLESS)], "a", "seedless"))[0] == expected
    assert ids_of(run([wanted, Job([9, 8], dataclasses.replace(SEEDED, seed=7))], "a", "seeded"))[0] == expected
    crowd = [
        Job([20 + index] * (1 + index), SEEDLESS if index % 2 else dataclasses.replace(SEEDED, seed=index, top_k=9))
        for index in range(NEIGHBOURS)
    ]
    assert ids_of(run([wanted, *crowd], "a", *(f"n{index}" for index in range(NEIGHBOURS))))[0] == expected
    late = dataclasses.replace(wanted, arrives=3)
    assert ids_of(run([Job([9, 8, 7], SEEDLESS), late], "neighbour", "a"))[1] == expected
    resting = dataclasses.replace(wanted, rest_at=OUTPUT // 2)
    preempted = run([resting, crowd[0]], "a", "n0")[0]
    assert preempted.preemptions == 1
    assert preempted.ids == expected
    [other] = ids_of(run([Job(PROMPT, dataclasses.replace(SEEDED, seed=43))], "a"))
    [one], [two] = (ids_of(run([Job(PROMPT, SEEDLESS)], name)) for name in ("one", "two"))
    assert len({tuple(ids) for ids in (expected, other, one, two)}) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
def test_edges_of_the_parameters(tiny_models: TinyModels, dtype: torch.dtype) -> None:
    runner = make_runner(tiny_models, dtype, True)
    base = dataclasses.replace(SEEDED, logprobs=0, max_tokens=OUTPUT if ON_GPU else 2)
    greedy: list[dict[str, Any]] = [
        *({"temperature": temperature} for temperature in (0.0, 1e-6, 1e-5, 1e-4)),
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 1e-8},
        {"temperature": 100.0, "top_k": 1},
    ]
    off: list[dict[str, Any]] = [{}, *({"top_k": top_k} for top_k in (-1, 0, VOCABULARY, VOCABULARY + 1))]
    off += [{"top_p": 1.0}, {"min_p": 0.0}]
    odd: list[dict[str, Any]] = [{"temperature": 0.01}, {"temperature": 100.0}, {"min_p": 1e-9}, {"top_p": 1 - 1e-7}]
    jobs = [Job(PROMPT, dataclasses.replace(base, **changes)) for changes in (*greedy, *off, *odd)]
    for job in jobs:
        job.params.validate(VOCABULARY)
    answers = Stack(runner, max_num_seqs=NEIGHBOURS + 2).run(jobs)
    ids = ids_of(answers)
    assert ids[: len(greedy)] == [ids[0]] * len(greedy)
    assert ids[len(greedy) : len(greedy) + len(off)] == [ids[len(greedy)]] * len(off)
    assert ids[0] != ids[len(greedy)]
    for answer in answers:
        assert len(answer.records) == len(answer.ids) == base.max_tokens
        assert all(math.isfinite(unpack(record).token.logprob) for record in answer.records)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 65504.0])
def test_logits_of_any_size(device: torch.device, scale: float) -> None:
    """Up to the largest of half precision, at the lowest temperature that is not greedy."""
    cases: list[dict[str, Any]] = [
        {"temperature": 1.01e-4},
        {"temperature": 1.01e-4, "top_p": 0.5},
        {"temperature": 1.01e-4, "min_p": 0.5, "top_k": 7},
        {"temperature": 100.0, "top_p": 1e-7},
        {"temperature": 100.0, "min_p": 0.999},
    ]
    pair = Pair(len(cases), 1000, device)
    for slot, params in enumerate(cases):
        pair.add(slot, seed=slot, logprobs=1, **params)
    logits = torch.randn(len(cases), 1000, generator=torch.Generator().manual_seed(1)).clamp_(-1, 1) * scale
    slots = list(range(len(cases)))
    tokens, records = pair.sample(logits, slots)
    for row, ids in enumerate(zip(tokens, pair.expected(logits, slots)[0], strict=True)):
        # Logits of hundreds of millions, once divided by the temperature, have no room for noise but in their rounding.
        assert len(set(ids)) == 1 or (scale > 1e4 and logits[row, ids[0]] == logits[row, ids[1]])
    assert all(math.isfinite(entry.logprob) for _, record in records for entry in unpack(record).top)
    if scale > 1:
        assert tokens[0] == logits[0].argmax() or logits[0, tokens[0]] == logits[0].max()


def test_ten_thousand_draws_are_those_of_the_cpu(device: torch.device) -> None:
    """Where they are not, the two scores are equal but for rounding."""
    slots, vocab_size, steps = (500, 3000, 20) if ON_GPU else (40, 300, 2)
    pair = Pair(slots, vocab_size, device)
    temperatures = torch.tensor([0.5 + slot / 400 for slot in range(slots)])
    seeds = torch.tensor([slot**5 - 900 for slot in range(slots)])
    pair.add_all(
        [make_request(slot, seed=int(seeds[slot]), temperature=float(temperatures[slot])) for slot in range(slots)]
    )
    rows, differing = torch.arange(slots), 0
    for step in range(steps):
        pair.state.num_tokens[:slots] = (rows % 7 + 12 + step).int()
        logits = make_logits(slots, vocab_size, seed=step, scale=2.0)
        found, expected = pair.sample(logits, rows.tolist(), "plain")[0], pair.expected(logits, rows.tolist())[0]
        noise = gumbel(seeds, torch.zeros_like(seeds), pair.state.num_tokens[:slots].long(), vocab_size)
        scores = (logits / temperatures[:, None] + noise).double()
        gaps = scores[rows, torch.tensor(expected)] - scores[rows, torch.tensor(found)]
        assert gaps.abs().max() < 3e-5
        differing += sum(a != b for a, b in zip(found, expected, strict=True))
    assert differing <= 2


def test_ten_thousand_rows_with_features_are_those_of_the_cpu(device: torch.device) -> None:
    """A sum's last bit may move a cut by a token; that is all."""
    slots, vocab_size, steps = (500, 2000, 20) if ON_GPU else (22, 150, 1)
    names = list(features(vocab_size, 3, 3, 0))
    pair = Pair(slots, vocab_size, device)
    for slot in range(slots):
        known = pair.state.token_ids[slot, : pair.state.num_tokens[slot]].tolist()
        by_name = features(vocab_size, known[-1], known[-2], slot)
        chosen: dict[str, Any] = {"temperature": (0.0, 0.7, 1.3)[slot % 3], "seed": slot}
        for place in range(slot % 4):
            chosen |= by_name[names[(slot + 3 * place) % len(names)]]
        pair.add(slot, **chosen)
    rows, differing = list(range(slots)), 0
    for step in range(steps):
        logits = make_logits(slots, vocab_size, seed=100 + step, scale=2.5)
        found, expected = pair.sample(logits, rows, "full")[0], pair.expected(logits, rows)[0]
        differing += sum(a != b for a, b in zip(found, expected, strict=True))
    assert differing <= slots * steps // 1000
