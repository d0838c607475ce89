"""Where rows are cut, among candidates and through the whole row: what is left is what the CPU's components leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.kernels.sampling_candidates import CANDIDATES, MOST, TILE
from gpu_worker.kernels.sampling_cut import find_cuts
from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.cuda_sampler import CudaSampler
from gpu_worker.sampling.min_p import MinP
from gpu_worker.sampling.temperature import Temperature
from gpu_worker.sampling.top_k import TopK
from gpu_worker.sampling.top_p import TopP
from tests.kernels.sampling_pair import make_logits, make_request

CASES: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_k": 40, "temperature": 0.6},
    {"top_k": MOST + 1},
    {"top_k": 900},
    {"top_p": 0.2},
    {"top_p": 0.9, "temperature": 0.6},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": MOST + 300, "top_p": 0.9},
    {"min_p": 0.01, "top_p": 0.9, "temperature": 1.5},
    {"min_p": 1e-7, "top_p": 0.95, "temperature": 3.0},
    {"min_p": 0.2, "top_k": 30, "top_p": 0.7},
    {},
    {"temperature": 0.0, "top_k": 9, "top_p": 0.5},
]


def expected(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] bool, what the CPU's components leave."""
    rows, vocab_size = logits.shape
    temperature, min_p, top_k, top_p = Temperature(rows), MinP(rows), TopK(rows, vocab_size), TopP(rows)
    for slot, params in enumerate(CASES):
        for component in (temperature, min_p, top_k, top_p):
            component.add(make_request(slot, **params))
    places = torch.zeros(rows, dtype=torch.int64)
    sample = SampleRows(np.arange(rows), places.numpy(), places, places.numpy(), places[:, None].int())
    shaped, greedy = logits.clone(), np.array([params.get("temperature") == 0.0 for params in CASES])
    temperature.temperature[greedy] = 1.0
    for component in (temperature, min_p, top_k, top_p):
        component.apply(shaped, sample)
    shaped[greedy] = logits[greedy]
    return shaped > -torch.inf


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (200, "normal"),
        (TILE + 7, "normal"),
        (CANDIDATES + 900, "normal"),
        (CANDIDATES + 900, "flat"),
        (CANDIDATES + 900, "equal"),
        (CANDIDATES + 900, "steep"),
        (CANDIDATES + 900, "masked"),
        (5 * TILE, "rounded"),
    ],
)
def test_what_is_left_is_what_the_cpu_leaves(size: int, kind: str, device: torch.device) -> None:
    logits = make_logits(len(CASES), size, seed=size)
    if kind == "flat":
        logits *= 0.01
    elif kind == "equal":
        logits[:] = -1.25
    elif kind == "steep":
        logits = logits.exp() * 3.0
    elif kind == "masked":
        logits[:, 40 : size - 40] = -torch.inf
    elif kind == "rounded":
        logits = logits.bfloat16().float()
    sampler = CudaSampler(len(CASES), size, None, device)
    sampler.add([make_request(slot, **params) for slot, params in enumerate(CASES)])
    slots = torch.arange(len(CASES), dtype=torch.int32, device=device)
    cuts = find_cuts(logits.to(device), slots, sampler.params.records, size).cpu()
    left = logits >= cuts[:, None]
    wanted = expected(logits)
    # Sums of tens of thousands of probabilities differ in their last bits: so may the last token of a nucleus.
    different = (left != wanted).sum(-1)
    has_top_p = torch.tensor(["top_p" in params for params in CASES])
    assert not different[~has_top_p].any(), different
    for row in torch.nonzero(different).flatten().tolist():
        assert logits[row][left[row] != wanted[row]].unique().numel() <= 2, CASES[row]
