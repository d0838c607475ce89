"""The sampler against plain formulas, and what must not change a draw."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import slot_init

from gpu_worker.sampling.argmax import argmax
from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.min_p import MinP
from gpu_worker.sampling.noise import Purpose, gumbel, row_keys
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.temperature import Temperature
from gpu_worker.sampling.top_k import TopK
from gpu_worker.sampling.top_p import TopP
from shared.sampling import SamplingParams

VOCAB = 2048


def rows_of(slots: list[int], position: int = 10, outputs: int = 5) -> SampleRows:
    """Rows at one position, of slots whose tokens are all 0."""
    count = len(slots)
    positions = torch.full((count,), position, dtype=torch.int64)
    return SampleRows(
        slots=np.array(slots, np.int64),
        num_outputs=np.full(count, outputs, np.int64),
        positions=positions,
        num_tokens=np.full(count, position, np.int64),
        token_ids=torch.zeros(max(slots) + 1, max(position, 1), dtype=torch.int32),
    )


def rows_at_each_position(count: int) -> SampleRows:
    """Rows of slot 0 that take the tokens 0..count-1."""
    rows = rows_of([0] * count, outputs=0)
    return dataclasses.replace(rows, positions=torch.arange(count))


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler_for(*params: SamplingParams, vocab: int = VOCAB, **options: Any) -> Sampler:
    sampler = Sampler(max(16, len(params)), vocab, **options)
    for slot, one in enumerate(params):
        sampler.add(slot_init(slot, [5], one))
    return sampler


def applied(component: Any, logits: torch.Tensor, *params: SamplingParams) -> torch.Tensor:
    for slot, one in enumerate(params):
        component.add(slot_init(slot, [5], one))
    result = logits.clone()
    component.apply(result, rows_of(list(range(len(params)))))
    return result


class TestFormulas:
    def test_temperature(self) -> None:
        logits = logits_of(2)
        result = applied(Temperature(4), logits, SamplingParams(temperature=0.7), SamplingParams(temperature=1.0))
        assert torch.allclose(result[0], logits[0] / 0.7)
        assert torch.equal(result[1], logits[1])

    @pytest.mark.parametrize("top_k", [1, 2, 40, VOCAB - 1])
    def test_top_k(self, top_k: int) -> None:
        logits = logits_of(2)
        result = applied(TopK(4, VOCAB), logits, SamplingParams(top_k=top_k), SamplingParams())
        kept = set(logits[0].topk(top_k).indices.tolist())
        assert set(torch.isfinite(result[0]).nonzero()[:, 0].tolist()) == kept
        assert torch.equal(result[1], logits[1])

    @pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
    def test_top_k_off(self, top_k: int) -> None:
        logits = logits_of(1)
        assert torch.equal(applied(TopK(4, VOCAB), logits, SamplingParams(top_k=top_k)), logits)

    @pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
    @pytest.mark.parametrize("flat", [False, True])
    def test_top_p(self, top_p: float, flat: bool) -> None:
        logits = logits_of(2) * (0.01 if flat else 1.0)
        result = applied(TopP(4), logits, SamplingParams(top_p=top_p), SamplingParams())
        probabilities, order = logits[0].double().softmax(-1).sort(descending=True, stable=True)
        before = probabilities.cumsum(-1) - probabilities
        kept = order[before < top_p] if top_p < 1 else order
        found = torch.isfinite(result[0]).nonzero()[:, 0]
        assert abs(len(kept) - len(found)) <= 1, "the border may fall on either side of a rounding"
        assert set(kept.tolist()[:-1]) <= set(found.tolist()) <= set(order[: len(kept) + 1].tolist())
        assert torch.equal(result[1], logits[1])

    @pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
    def test_min_p(self, min_p: float) -> None:
        logits = logits_of(1)
        result = applied(MinP(4), logits, SamplingParams(min_p=min_p))
        probabilities = logits[0].softmax(-1)
        kept = probabilities >= min_p * probabilities.max() * (1 - 1e-6)
        assert torch.equal(torch.isfinite(result[0]), kept)

    def test_draws_follow_the_distribution(self) -> None:
        logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, -torch.inf, 3.0, 1.5]]).expand(20_000, -1).contiguous()
        sampler = Sampler(1, 8)
        sampler.add(slot_init(0, [5], SamplingParams(seed=3)))
        drawn = sampler.sample(logits.clone(), rows_at_each_position(20_000)).bincount(minlength=8) / 20_000
        assert (drawn - logits[0].softmax(-1)).abs().max() < 0.015

    def test_order_is_min_p_then_top_k_then_top_p(self) -> None:
        """top-p counts the probability of what the others left: of 0.4, 0.3, 0.2, 0.1 with top_k 2, 0.57 is one."""
        logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(500, -1).contiguous()
        params = SamplingParams(top_k=2, top_p=0.57, seed=1)
        assert set(sampler_for(params, vocab=4).sample(logits, rows_at_each_position(500)).tolist()) == {0}


class TestEdges:
    GREEDY = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=1.5, top_k=1, seed=1),
        SamplingParams(temperature=1.5, min_p=1.0, seed=1),
        SamplingParams(temperature=1.5, top_p=1e-8, seed=1),
    )

    @pytest.mark.parametrize("params", GREEDY)
    def test_these_are_greedy_and_take_the_lowest_of_equal_ids(self, params: SamplingParams) -> None:
        logits = logits_of(1)
        logits[0, [77, 300, 1999]] = 50.0
        assert sampler_for(params).sample(logits, rows_of([0])).tolist() == [77]

    @pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
    def test_never_a_nan(self, scale: float) -> None:
        for temperature in (0.01, 0.5, 100.0):
            logits = logits_of(3) * scale
            token = sampler_for(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01, seed=1)).sample(
                logits, rows_of([0, 0, 0])
            )
            assert not logits.isnan().any()
            assert ((token >= 0) & (token < VOCAB)).all()

    def test_a_cold_draw_is_nearly_greedy(self) -> None:
        logits = logits_of(1)
        best = int(logits.argmax())
        assert sampler_for(SamplingParams(temperature=0.01, seed=4)).sample(logits, rows_of([0])).tolist() == [best]

    def test_padded_vocabulary_is_never_sampled(self) -> None:
        logits = logits_of(2)
        logits[:, 2000:] = 100.0
        tokens = sampler_for(SamplingParams(temperature=0), SamplingParams(temperature=2.0, seed=1), num_tokens=2000)
        assert (tokens.sample(logits, rows_of([0, 1])) < 2000).all()

    def test_min_tokens_masks_what_ends_the_text(self) -> None:
        ends = {"eos": [2], "own": [9, 11]}
        logits = torch.zeros(1, VOCAB)
        logits[0, [*ends["eos"], *ends["own"]]] = torch.tensor([30.0, 40.0, 50.0])
        logits[0, 500] = 20.0
        for ignore_eos, outputs, expected in [(False, 2, 500), (True, 2, 2), (False, 3, 11), (True, 3, 11)]:
            params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=ends["own"], ignore_eos=ignore_eos)
            sampler = sampler_for(params)
            assert sampler.sample(logits.clone(), rows_of([0], outputs=outputs)).tolist() == [expected]

    def test_a_slot_forgets_its_last_request(self) -> None:
        sampler = sampler_for(SamplingParams(min_tokens=8, top_k=3, top_p=0.1, min_p=0.5, temperature=0.3, seed=1))
        sampler.add(slot_init(0, [5], SamplingParams(seed=9)))
        fresh = sampler_for(SamplingParams(seed=9))
        for position in range(20):
            one = sampler.sample(logits_of(1, seed=position), rows_of([0], position, outputs=0))
            assert torch.equal(one, fresh.sample(logits_of(1, seed=position), rows_of([0], position, outputs=0)))


class TestDraws:
    PARAMS = (
        SamplingParams(temperature=0.8, seed=42),
        SamplingParams(temperature=1.2, seed=7, top_k=50),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.8, seed=-5),
        SamplingParams(temperature=0.9, min_p=0.02, seed=2**63 - 1),
    )

    def test_neighbours_and_order_change_nothing(self) -> None:
        sampler, logits = sampler_for(*self.PARAMS), logits_of(5)
        alone = [int(sampler.sample(logits[[i]].clone(), rows_of([i]))) for i in range(5)]
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [3, 0], [0, 0, 0, 3]):
            assert sampler.sample(logits[order].clone(), rows_of(order)).tolist() == [alone[i] for i in order]

    def test_seed_choice_position_and_purpose_each_matter(self) -> None:
        def noise(seed: int = 1, choice: int = 0, position: int = 0, purpose: int = 1) -> torch.Tensor:
            one = (torch.tensor([value]) for value in (seed, choice, position))
            return gumbel(*one, 4096, purpose=purpose)  # type: ignore[arg-type]

        base = noise()
        assert torch.equal(base, noise())
        for other in (noise(seed=2), noise(choice=1), noise(position=1), noise(purpose=2), noise(1, 1, 1)):
            assert (base == other).float().mean() < 0.01
            assert abs(float(torch.corrcoef(torch.cat([base, other]))[0, 1])) < 0.06
        assert not torch.equal(noise(choice=1, position=2), noise(choice=2, position=1))

    def test_the_values_are_those_of_the_formulas(self) -> None:
        """In plain integers. A restart with another version must not redraw: the numbers are part of the interface."""
        for seed, choice, position in [(42, 0, 0), (-1, 3, 17), (2**63 - 1, 127, 131_071), (-(2**63), 1, 5)]:
            key = reference_key(seed, choice, position, 1)
            counters = (torch.tensor([value]) for value in (seed, choice, position))
            found = row_keys(*counters, Purpose.SAMPLE)
            assert int(found) % 2**64 == key
            noise = gumbel(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]), 1000)
            expected = [reference_noise(key, token) for token in range(1000)]
            assert noise[0].tolist() == pytest.approx(expected, abs=1e-3)

    def test_noise_has_gumbels_moments(self) -> None:
        noise = gumbel(torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.arange(64), 4096).double()
        assert torch.isfinite(noise).all()
        assert abs(float(noise.mean()) - 0.5772) < 0.01
        assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
        flat = noise.flatten()
        assert abs(float(torch.corrcoef(torch.stack([flat[:-1], flat[1:]]))[0, 1])) < 0.01

    def test_two_seeds_differ_and_no_seed_is_fixed_by_the_request_id(self) -> None:
        logits = torch.zeros(1, VOCAB)
        sampler = sampler_for(*(SamplingParams(seed=s) for s in range(4)), SamplingParams(), SamplingParams())
        tokens = [int(sampler.sample(logits.clone(), rows_of([slot]))) for slot in range(6)]
        assert len(set(tokens)) == 6


@pytest.mark.parametrize("size", [1, 7, 256, 512, 1000, 384, 1184])
def test_argmax_takes_the_first_of_equal_maxima(size: int) -> None:
    values = torch.randint(0, 3, (50, size), generator=torch.Generator().manual_seed(0)).float()
    assert argmax(values).tolist() == [int(np.argmax(row)) for row in values.numpy()]


def mixed(x: int, bits: int, *rounds: tuple[int, int]) -> int:
    """``x ^= x >> shift; x *= factor`` for each round."""
    for shift, factor in rounds:
        x = (x ^ (x >> shift)) * factor % 2**bits
    return x


def reference_key(seed: int, choice: int, position: int, purpose: int) -> int:
    def mix(x: int) -> int:
        return mixed(x % 2**64, 64, (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

    golden = 0x9E3779B97F4A7C15
    key = mix(seed + golden)
    for counter in (choice, position):
        key = mix((key ^ counter) + golden)
    return mix(key ^ purpose)


def reference_noise(key: int, token: int) -> float:
    def mix(x: int) -> int:
        return mixed(x, 32, (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))

    bits = mix(mix((token * 0x9E3779B9 + key) % 2**32) ^ (key >> 32))
    return -math.log(-math.log1p(-((bits % 2**31) + 0.5) / 2**31))
