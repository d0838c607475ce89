"""Looking at the most probable tokens only, and not sorting, give what sorting the whole vocabulary gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from runner_harness import slot_init

from gpu_worker.sampling.argmax import argmax
from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.noise import gumbel
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.shortlist import SIZES
from gpu_worker.sampling.threshold import least_kept
from shared.sampling import SamplingParams

VOCAB = 8192
ROWS = 48


def rows_of(slots: list[int], position: int = 9) -> SampleRows:
    count = len(slots)
    lengths = np.full(count, position)
    token_ids = torch.zeros(max(slots) + 1, 16, dtype=torch.int32)
    return SampleRows(np.array(slots), np.full(count, 1), torch.full((count,), position), lengths, token_ids)


def random_params(draw: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        temperature=draw.choice([0.3, 0.8, 1.0, 2.0]),
        top_k=draw.choice([0, 0, 5, 128, 129, 1000, 3000]),
        top_p=draw.choice([1.0, 1.0, 0.5, 0.9, 0.999]),
        min_p=draw.choice([0.0, 0.0, 1e-4, 0.05]),
    )


def make_logits(draw: random.Random, rounded: bool) -> torch.Tensor:
    """Peaked and flat rows; rounded to bfloat16 they are full of equal values."""
    scale = torch.tensor([draw.choice([0.02, 0.5, 1.0, 3.0]) for _ in range(ROWS)])[:, None]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(draw.getrandbits(30))) * scale + 5.0
    return logits.bfloat16().float() if rounded else logits


@pytest.mark.parametrize("rounded", [False, True])
def test_survivors_and_draws_are_those_of_the_whole_row(rounded: bool) -> None:
    draw = random.Random(7)
    sampler, used = Sampler(ROWS, VOCAB), 0
    for seed in range(3):
        for slot in range(ROWS):
            sampler.add(slot_init(slot, [1], random_params(draw, seed)))
        logits, rows = make_logits(draw, rounded), rows_of(list(range(ROWS)))
        whole = logits.clone()
        for shaper in sampler.shapers:
            shaper.apply(whole, rows)
        for short in sampler.shortlister.settle(logits.clone(), rows):
            for row, values, ids in zip(short.rows.tolist(), short.logits, short.ids, strict=True):
                kept = torch.full((VOCAB,), -torch.inf).scatter(0, ids, values)
                differs = kept != whole[row]
                # Sums of thousands of probabilities round differently: the last token of a nucleus may go either way.
                assert int(differs.sum()) <= (sampler.top_p.top_p[row] < 1.0)
                assert bool((logits[row, differs] <= kept[kept > -torch.inf].min()).all())
                whole[row] = kept
            used += len(short.rows)
        noise = gumbel(torch.full((ROWS,), seed), torch.zeros(ROWS, dtype=torch.int64), rows.positions, VOCAB)
        assert torch.equal(sampler.sample(logits, rows), argmax(whole + noise))
    assert used > ROWS, "many rows were settled by their most probable tokens"


def test_neighbours_change_no_draw() -> None:
    draw, sampler = random.Random(9), Sampler(ROWS, VOCAB)
    for slot in range(ROWS):
        sampler.add(slot_init(slot, [1], random_params(draw, 100 + slot)))
    logits = make_logits(draw, False)
    alone = [int(sampler.sample(logits[[slot]].clone(), rows_of([slot]))) for slot in range(ROWS)]
    for count in (2, 7, 20, ROWS):
        order = draw.sample(range(ROWS), count)
        assert sampler.sample(logits[order].clone(), rows_of(order)).tolist() == [alone[slot] for slot in order]


def test_each_size_is_used() -> None:
    normal = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits = normal * torch.tensor([8.0, 2.5, 1.5, 0.01])[:, None]
    sampler = Sampler(4, VOCAB)
    for slot in range(4):
        sampler.add(slot_init(slot, [1], SamplingParams(top_p=0.7, seed=1)))
    found = sampler.shortlister.settle(logits, rows_of([0, 1, 2, 3]))
    sizes = [(short.rows.tolist(), short.ids.shape[1]) for short in found]
    assert sizes == [([row], size) for row, size in enumerate(SIZES)]


@pytest.mark.parametrize("rounded", [False, True])
def test_a_threshold_is_that_of_a_sort(rounded: bool) -> None:
    logits = make_logits(random.Random(1), rounded)
    logits[:, ::5] = -torch.inf
    values = logits.sort(dim=-1, descending=True).values
    for rank in (1, 2, 50, 4000):
        target = torch.full((ROWS, 1), float(rank))
        assert torch.equal(least_kept(logits, torch.ones_like(logits), target)[:, 0], values[:, rank - 1])
    probabilities = values.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    for top_p in (1e-6, 0.3, 0.9):
        found = least_kept(logits, logits.softmax(-1), torch.full((ROWS, 1), top_p))
        index = (before < top_p).sum(-1) - 1
        rank = (values.double() > found.double()).sum(-1)
        assert ((values.gather(1, index[:, None]) == found)[:, 0] | ((rank - index).abs() <= 1)).all()


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
def test_top_k_off_draws_as_without(top_k: int) -> None:
    for other in ({}, {"top_p": 0.9}, {"min_p": 0.05}):
        sampler = Sampler(2, VOCAB)
        sampler.add(slot_init(0, [1], SamplingParams(seed=3, top_k=top_k, **other)))  # type: ignore[arg-type]
        sampler.add(slot_init(1, [1], SamplingParams(seed=3, **other)))  # type: ignore[arg-type]
        for seed in range(5):
            logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)).expand(2, -1).clone()
            first, second = sampler.sample(logits, rows_of([0, 1])).tolist()
            assert first == second


@pytest.mark.parametrize("logits", ["all masked", "all but one masked", "equal", "huge", "tiny"])
def test_strange_rows_give_a_token_and_no_nan(logits: str) -> None:
    values = {
        "all masked": torch.full((1, VOCAB), -torch.inf),
        "all but one masked": torch.full((1, VOCAB), -torch.inf).index_fill_(1, torch.tensor([77]), 1.0),
        "equal": torch.full((1, VOCAB), 2.5),
        "huge": torch.randn(1, VOCAB) * 1e30,
        "tiny": torch.randn(1, VOCAB) * 1e-30,
    }[logits]
    draw = random.Random(3)
    for seed in range(30):
        sampler, found = Sampler(1, VOCAB), values.clone()
        sampler.add(slot_init(0, [1], random_params(draw, seed)))
        token = int(sampler.sample(found, rows_of([0])))
        assert not found.isnan().any()
        assert 0 <= token < VOCAB
        assert logits != "all but one masked" or token == 77
