"""Each feature alone, each pair, and all at once: tokens and log-probabilities of the CPU's sampler."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from shared.logprobs import unpack
from tests.kernels.sampling_pair import LONGEST, Pair, Record, features, make_logits

VOCABULARY = 157
NAMES = list(features(VOCABULARY, 3, 3, 0))


def request_of(pair: Pair, slot: int, names: tuple[str, ...], seed: int) -> dict[str, Any]:
    known = pair.state.token_ids[slot, : pair.state.num_tokens[slot]].tolist()
    by_name = features(VOCABULARY, known[-1], known[-2], seed)
    params: dict[str, Any] = {"temperature": (0.0, 0.8, 1.6)[seed % 3], "seed": seed}
    for name in names:
        params |= by_name[name]
    return params


def check_records(found: list[Record], expected: list[Record]) -> None:
    assert [row for row, _ in found] == [row for row, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        a, b = unpack(one), unpack(other)
        assert a.rank == b.rank
        assert [entry.token_id for entry in (a.token, *a.top)] == [entry.token_id for entry in (b.token, *b.top)]
        for x, y in zip((a.token, *a.top), (b.token, *b.top), strict=True):
            assert math.isclose(x.logprob, y.logprob, abs_tol=2e-5)


def check(pair: Pair, logits: torch.Tensor, slots: list[int]) -> None:
    found, expected = pair.sample(logits, slots, "full"), pair.expected(logits, slots)
    assert found[0] == expected[0]
    check_records(found[1], expected[1])


@pytest.mark.parametrize("seed", range(2))
def test_each_feature_alone_and_all_together_beside_rows_without_any(seed: int, device: torch.device) -> None:
    cases = [(), *((name,) for name in NAMES), (), tuple(NAMES)]
    pair = Pair(len(cases), VOCABULARY, device, num_tokens=VOCABULARY - 4)
    for slot, names in enumerate(cases):
        pair.add(slot, choice=seed, **request_of(pair, slot, names, slot + seed))
    slots = list(range(len(cases)))
    check(pair, make_logits(len(slots), VOCABULARY, seed, scale=2.0), slots[::-1])


def test_pairs_of_features(device: torch.device) -> None:
    cases = list(itertools.combinations(NAMES, 2))
    if device.type != "cuda":
        cases = cases[::2]
    pair = Pair(len(cases), VOCABULARY, device, num_tokens=VOCABULARY - 4)
    for slot, names in enumerate(cases):
        pair.add(slot, **request_of(pair, slot, names, slot + 1))
    slots = list(range(len(cases)))
    check(pair, make_logits(len(slots), VOCABULARY, 5, scale=2.0), slots)


@pytest.mark.slow
@pytest.mark.parametrize("names", list(itertools.combinations(NAMES, 3)))
def test_triples_of_features(names: tuple[str, ...], device: torch.device) -> None:
    pair = Pair(9, VOCABULARY, device)
    for slot in range(9):
        pair.add(slot, **request_of(pair, slot, names, slot))
    check(pair, make_logits(9, VOCABULARY, len("".join(names)), scale=2.0), list(range(9)))


def test_equal_logits(device: torch.device) -> None:
    """As in half precision, where many are: ties at the cuts stay, and go to the lowest id."""
    cases: list[dict[str, Any]] = [{"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 20}, {"temperature": 0.0}]
    pair = Pair(len(cases), 300, device)
    for slot, params in enumerate(cases):
        pair.add(slot, **params)
    check(pair, make_logits(len(cases), 300, 0, scale=2.0).round(), list(range(len(cases))))


def test_what_leaves_nothing_gives_way(device: torch.device) -> None:
    pair = Pair(5, VOCABULARY, device, num_tokens=100)
    pair.add(0, allowed_token_ids=[7, 9], bad_words_token_ids=[[7], [9], [9]])
    pair.add(1, allowed_token_ids=[7, 9], min_tokens=50, max_tokens=60, stop_token_ids=[7, 9])
    pair.add(2, bad_words_token_ids=[[token] for token in range(100)], temperature=0.0)
    pair.add(3, allowed_token_ids=[7, 9], bad_words_token_ids=[[7]], min_tokens=50, max_tokens=60, stop_token_ids=[9])
    pair.add(4, allowed_token_ids=[120], temperature=0.0)
    logits = make_logits(5, VOCABULARY, 2)
    check(pair, logits, [4, 3, 2, 1, 0])
    tokens = pair.sample(logits, [0, 1, 2, 3, 4], "full")[0]
    assert set(tokens[:2]) <= {7, 9}
    assert tokens[3:] == [9, 0]


def test_known_tokens_that_occur_again_and_again(device: torch.device) -> None:
    pair = Pair(3, VOCABULARY, device)
    pair.state.token_ids[:, ::2] = 5
    pair.state.num_tokens[:3] = torch.tensor([LONGEST, LONGEST, 20])
    pair.state.prompt_len[:3] = torch.tensor([10, LONGEST, 1])
    for slot in range(3):
        pair.add(slot, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.2)
    logits = make_logits(3, VOCABULARY, 8)
    logits[:, 5] = 9.0
    check(pair, logits, [0, 1, 2])


def test_a_slot_that_is_given_away_keeps_nothing(device: torch.device) -> None:
    pair = Pair(2, VOCABULARY, device)
    pair.add(0, **request_of(pair, 0, tuple(NAMES), 1))
    pair.add(0, temperature=0.7, seed=3)
    assert pair.kernels.variant_of(np.array([0, 1, 2])) == "plain"
    logits = make_logits(1, VOCABULARY, 4)
    check(pair, logits, [0])
    pair.add(0, logprobs=0)
    assert pair.kernels.variant_of(np.array([1, 2])) == "plain"
    assert pair.kernels.variant_of(np.array([0, 1])) == "full"


def test_lists_outgrow_the_arena(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.sampling.cuda_slots.ARENA_WORDS", 128)
    pair = Pair(6, VOCABULARY, device)
    for slot in range(6):
        pair.add(slot, **request_of(pair, slot, ("bad_words", "bias", "allowed"), slot + 2))
    slots = list(range(6))
    check(pair, make_logits(6, VOCABULARY, 1), slots)
    end = pair.kernels.params.blocks.end
    for slot in (3, 1, 3):
        pair.add(slot, **request_of(pair, slot, ("bad_words", "bias", "allowed"), slot + 5))
    check(pair, make_logits(6, VOCABULARY, 2), slots)
    assert pair.kernels.params.blocks.end == end
