"""Sampled tokens follow the distribution that the parameters describe: chi-square over 20,000 draws each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import slot_init

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.shortlist import SIZES
from shared.sampling import SamplingParams

DRAWS, STEP = 20_000, 2_000
SMALLEST_P = 0.001
FEWEST_EXPECTED = 5.0

PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.5": {"temperature": 1.5},
    "top-k 5": {"top_k": 5},
    "top-k 40": {"top_k": 40},
    "top-p 0.5": {"top_p": 0.5},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.02": {"min_p": 0.02},
    "min-p 0.2": {"min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
}


def plain_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocabulary] float64: the formulas, with a sort."""
    probabilities = (logits.double() / params.temperature).softmax(-1)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    if params.top_k > 0:
        probabilities[probabilities < probabilities.sort(descending=True).values[params.top_k - 1]] = 0.0
    probabilities /= probabilities.sum()
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0.0
    return probabilities / probabilities.sum()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square test; rare tokens are counted together."""
    expected = probabilities * counts.sum()
    rare = expected < FEWEST_EXPECTED
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic / 2))


def drawn(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocabulary] how often each token was drawn, at positions 0..DRAWS-1."""
    sampler = Sampler(1, len(logits))
    sampler.add(slot_init(0, [1], params))
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for first in range(0, DRAWS, STEP):
        slots, lengths = np.zeros(STEP, np.int64), np.full(STEP, 1)
        rows = SampleRows(slots, slots, torch.arange(first, first + STEP), lengths, torch.zeros(1, 4).int())
        counts += sampler.sample(logits.expand(STEP, -1).contiguous(), rows).bincount(minlength=len(logits))
    return counts


@pytest.mark.parametrize("vocab", [64, 4 * SIZES[0]])
@pytest.mark.parametrize("name", PARAMETERS)
def test_draws_pass_a_chi_square_test(name: str, vocab: int) -> None:
    """The small vocabulary is looked at as a whole, the large one by its most probable tokens where that is enough."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    params = SamplingParams(seed=11, **PARAMETERS[name])
    counts, probabilities = drawn(logits, params), plain_distribution(logits, params)
    assert int(counts[probabilities == 0].sum()) == 0
    assert p_value(counts, probabilities) > SMALLEST_P


def test_the_test_would_notice_a_wrong_temperature() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 2
    counts = drawn(logits, SamplingParams(seed=11, temperature=1.0))
    assert p_value(counts, plain_distribution(logits, SamplingParams(temperature=1.05))) < SMALLEST_P
