"""Penalties, biases and allowed ids against their formulas, and which tokens a penalty sees."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import Harness, make_runner, make_step, slot_init
from tiny_models import VOCABULARY, TinyModels
from transformers import RepetitionPenaltyLogitsProcessor

from gpu_worker.sampling.allowed_token_ids import AllowedTokenIds
from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.frequency_penalty import FrequencyPenalty
from gpu_worker.sampling.logit_bias import LogitBias
from gpu_worker.sampling.presence_penalty import PresencePenalty
from gpu_worker.sampling.repetition_penalty import RepetitionPenalty
from gpu_worker.sampling.sampler import Sampler
from shared.sampling import SamplingParams

VOCAB, LENGTH = 500, 64
CPU = torch.device("cpu")
PROMPT, OUTPUT = [3, 3, 7, 499, 7], [7, 11, 11, 11, 0]
"""Tokens of the prompt only, of the output only, of both, and repeated ones."""
PENALISED = SamplingParams(
    temperature=0.0, max_tokens=None, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5
)


def logits_of(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3


def rows_of(*texts: tuple[Sequence[int], Sequence[int]]) -> SampleRows:
    """Row i: a slot that holds the i-th (prompt, output), among stale tokens of earlier requests."""
    token_ids = torch.full((len(texts), LENGTH), 250, dtype=torch.int32)
    for slot, (prompt, output) in enumerate(texts):
        token_ids[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    lengths = np.array([len(prompt) + len(output) for prompt, output in texts], np.int64)
    outputs = np.array([len(output) for _, output in texts], np.int64)
    return SampleRows(np.arange(len(texts)), outputs, torch.from_numpy(lengths), lengths, token_ids)


def applied(component: Any, logits: torch.Tensor, rows: SampleRows, *params: SamplingParams) -> torch.Tensor:
    for slot, one in enumerate(params):
        component.add(slot_init(slot, [5], one))
    result = logits.clone()
    component.apply(result, rows)
    return result


def expected(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    """The formulas in double precision, token by token."""
    result = logits.double().clone()
    for token in {*prompt, *output}:
        by = params.repetition_penalty
        result[token] = result[token] / by if result[token] > 0 else result[token] * by
    for token, count in Counter(output).items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=1e-6, atol=1e-6)


class TestFormulas:
    @pytest.mark.parametrize("penalty", [0.5, 0.9, 1.1, 1.5, 10.0])
    def test_repetition_is_that_of_transformers(self, penalty: float) -> None:
        logits = logits_of(2)
        rows = rows_of((PROMPT, OUTPUT), (PROMPT, []))
        params = SamplingParams(repetition_penalty=penalty)
        found = applied(RepetitionPenalty(2), logits, rows, params, params)
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        for row, ids in enumerate((PROMPT + OUTPUT, PROMPT)):
            assert near(found[row], processor(torch.tensor([ids]), logits[[row]].clone())[0])

    @pytest.mark.parametrize("penalty", [-2.0, -0.3, 0.7, 2.0])
    def test_presence_and_frequency_see_the_output_only(self, penalty: float) -> None:
        logits = logits_of(2)
        rows = rows_of((PROMPT, OUTPUT), (PROMPT, []))
        presence, frequency = SamplingParams(presence_penalty=penalty), SamplingParams(frequency_penalty=penalty)
        for component, params in ((PresencePenalty(2), presence), (FrequencyPenalty(2), frequency)):
            found = applied(component, logits, rows, params, params)
            assert near(found[0], expected(logits[0], PROMPT, OUTPUT, params))
            assert torch.equal(found[1], logits[1])

    def test_frequency_of_a_long_run_is_exact(self) -> None:
        logits, params = logits_of(1), SamplingParams(frequency_penalty=0.1)
        output = [9] * (LENGTH - 1)
        found = applied(FrequencyPenalty(1), logits, rows_of(([1], output)), params)
        assert near(found[0], expected(logits[0], [1], output, params))

    def test_logit_bias(self) -> None:
        logits = logits_of(3)
        rows = rows_of(([1], []), ([1], []), ([1], []))
        biases = [[(0, -100.0), (499, 0.25)], [], [(7, 100.0)]]
        found = applied(LogitBias(CPU), logits, rows, *(SamplingParams(logit_bias=pairs) for pairs in biases))
        wanted = logits.clone()
        for row, pairs in enumerate(biases):
            for token, bias in pairs:
                wanted[row, token] += bias
        assert torch.equal(found, wanted)

    def test_allowed_token_ids(self) -> None:
        logits = logits_of(3)
        rows = rows_of(([1], []), ([1], []), ([1], []))
        allowed = [[7, 499, 7], None, [0]]
        found = applied(AllowedTokenIds(CPU), logits, rows, *(SamplingParams(allowed_token_ids=ids) for ids in allowed))
        for row, ids in enumerate(allowed):
            kept = range(VOCAB) if ids is None else sorted(set(ids))
            assert torch.isfinite(found[row]).nonzero()[:, 0].tolist() == list(kept)
            assert torch.equal(found[row, list(kept)], logits[row, list(kept)])

    def test_all_of_them_in_their_order(self) -> None:
        """A bias that turns a logit's sign turns what the repetition penalty does with it."""
        logits = torch.tensor([[1.0, -1.0, 2.0, 3.0]])
        params = SamplingParams(
            temperature=0.5,
            repetition_penalty=2.0,
            frequency_penalty=0.25,
            presence_penalty=1.0,
            logit_bias=[(0, -3.0), (1, 5.0)],
            allowed_token_ids=[0, 1, 2],
        )
        sampler = Sampler(1, 4)
        sampler.add(slot_init(0, [0], params))
        rows = rows_of(([0], [1, 1]))
        for component in (*sampler.constraints, *sampler.shapers):
            component.apply(logits, rows)
        wanted = [(1 - 3) * 2 / 0.5, ((-1 + 5) / 2 - 2 * 0.25 - 1) / 0.5, 2 / 0.5, -torch.inf]
        assert near(logits[0], torch.tensor(wanted))


class TestEdges:
    NEUTRAL = SamplingParams(
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=[], allowed_token_ids=None
    )

    def test_neutral_values_leave_every_bit(self) -> None:
        logits, rows = logits_of(2), rows_of((PROMPT, OUTPUT), (PROMPT, OUTPUT))
        for component in Sampler(2, VOCAB).constraints:
            assert torch.equal(applied(component, logits, rows, PENALISED, self.NEUTRAL)[1], logits[1])
            assert torch.equal(applied(component, logits, rows, self.NEUTRAL, self.NEUTRAL), logits)

    @pytest.mark.parametrize("penalty", [1e-300, 1e-9, 0.01, 10.0])
    def test_never_a_nan(self, penalty: float) -> None:
        params = SamplingParams(repetition_penalty=penalty, top_p=0.9, min_p=0.01, temperature=0.01, seed=1)
        sampler = Sampler(1, VOCAB)
        sampler.add(slot_init(0, PROMPT, params))
        logits = logits_of(1) * 10
        logits[0, PROMPT] = torch.tensor([0.0, 0.0, 80.0, -torch.inf, 80.0])
        token = sampler.sample(logits, rows_of((PROMPT, OUTPUT)))
        assert not logits.isnan().any()
        assert 0 <= int(token) < VOCAB

    def test_min_tokens_leaves_an_allowed_token(self) -> None:
        """[allowed ids, sampled id]: id 2 ends the text."""
        for allowed, token in [([2], 2), ([2, 9], 9)]:
            sampler = Sampler(1, VOCAB)
            params = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=8, allowed_token_ids=allowed)
            sampler.add(slot_init(0, [5], params))
            logits = torch.zeros(1, VOCAB)
            logits[0, 2] = 9.0
            assert sampler.sample(logits, rows_of(([5], []))).tolist() == [token]

    def test_a_masked_token_stays_masked(self) -> None:
        sampler = Sampler(1, VOCAB, num_tokens=400)
        params = SamplingParams(temperature=0.0, logit_bias=[(450, 100.0), (8, 100.0)], allowed_token_ids=[7, 450])
        sampler.add(slot_init(0, [5], params))
        assert sampler.sample(logits_of(1), rows_of(([5], []))).tolist() == [7]

    def test_a_slot_forgets_its_last_request(self) -> None:
        logits, rows = logits_of(1), rows_of((PROMPT, OUTPUT))
        everything = SamplingParams(
            repetition_penalty=2.0,
            presence_penalty=1.0,
            frequency_penalty=1.0,
            logit_bias=[(7, 100.0)],
            allowed_token_ids=[7],
        )
        sampler = Sampler(1, VOCAB)
        for component in sampler.constraints:
            component.add(slot_init(0, PROMPT, everything))
            assert torch.equal(applied(component, logits, rows, self.NEUTRAL), logits)

    def test_neighbours_and_order_change_no_bit(self) -> None:
        texts = [(PROMPT, OUTPUT), ([1], []), ([4, 4], [4] * 40), (PROMPT * 6, OUTPUT * 3)]
        several = (
            PENALISED,
            SamplingParams(repetition_penalty=0.8, logit_bias=[(3, 1.0)]),
            SamplingParams(frequency_penalty=-1.0, allowed_token_ids=[4, 5, 6]),
            SamplingParams(presence_penalty=-0.5, logit_bias=[(1, 2.0), (2, 3.0)], allowed_token_ids=[1, 2]),
        )
        logits, rows, sampler = logits_of(4), rows_of(*texts), Sampler(4, VOCAB)
        for slot, params in enumerate(several):
            sampler.add(slot_init(slot, [5], params))

        def constrained(order: list[int]) -> torch.Tensor:
            result = logits[order].clone()
            for component in sampler.constraints:
                component.apply(result, rows.select(np.array(order)))
            return result

        alone = torch.cat([constrained([row]) for row in range(4)])
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 1, 3]):
            assert torch.equal(constrained(order), alone[order])


class TestInSteps:
    """The runner's own bookkeeping: which tokens a penalty sees however they came into the slot."""

    PROMPT = random.Random(8).choices(range(5, 40), k=40)
    COUNT = 30

    @pytest.fixture
    def harness(self, tiny_models: TinyModels) -> Harness:
        return Harness(make_runner(tiny_models.folder("llama")))

    @pytest.fixture
    def seen(self, harness: Harness) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """For each slot, the logits of its greedy rows before and after the constraints, step by step."""
        seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        sample = harness.runner.sampler.sample

        def record(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
            before, tokens = logits.clone(), sample(logits, rows)
            for row, slot in enumerate(rows.slots.tolist()):
                seen.setdefault(slot, []).append((before[row], logits[row].clone()))
            return tokens

        harness.runner.sampler.sample = record  # type: ignore[method-assign]
        return seen

    def check(self, seen: list[tuple[torch.Tensor, torch.Tensor]], output: list[int]) -> None:
        """The last steps of a slot are those of the formulas, and its tokens the best of them."""
        assert len(output) == self.COUNT
        for index in range(self.COUNT - len(seen), self.COUNT):
            before, after = seen[index - self.COUNT]
            assert near(after, expected(before, self.PROMPT, output[:index], PENALISED))
            assert output[index] == int(after.argmax())

    def rest(self, harness: Harness, output: list[int], slot: int = 0) -> list[int]:
        while len(output) < self.COUNT:
            output += harness.decode([slot], len(self.PROMPT) + len(output))
        return output

    def begin(self, harness: Harness, known: list[int], chunk: int) -> list[int]:
        """A request in slot 0 whose known tokens are computed in chunks; its next token."""
        new = [slot_init(0, known, PENALISED, prompt_len=len(self.PROMPT))]
        parts: dict[str, Any] = {"new": new, "new_tokens": known, "blocks": harness.blocks_for(0, len(known))}
        tokens: list[int] = []
        for start in range(0, len(known), chunk):
            count = min(chunk, len(known) - start)
            last = [(0, 0)] if start + count == len(known) else []
            tokens = harness.step(**parts, prefill=[(0, start, count)], sample=last)
            parts = {}
        return tokens

    @pytest.mark.parametrize("chunk", [7, 40])
    def test_chunked_prompt(self, harness: Harness, seen: Any, chunk: int) -> None:
        output = self.rest(harness, self.begin(harness, self.PROMPT, chunk))
        assert len(seen[0]) == self.COUNT
        self.check(seen[0], output)

    @pytest.mark.parametrize("chunk", [9, 100])
    def test_resumed_after_preemption(self, harness: Harness, seen: Any, chunk: int) -> None:
        whole = harness.generate(self.PROMPT, self.COUNT, params=PENALISED)
        harness.step(released=[0])
        harness.tables.pop(0)
        seen.clear()
        done = whole[:12]
        output = self.rest(harness, done + self.begin(harness, self.PROMPT + done, chunk))
        assert len(seen[0]) == self.COUNT - 12
        self.check(seen[0], output)
        assert output == whole

    def test_prefix_hit(self, harness: Harness, seen: Any) -> None:
        """Slot 1 takes the two full blocks of slot 0's prompt and computes what comes after."""
        harness.start({0: self.PROMPT})
        harness.tables[1] = harness.tables[0][:2]
        tokens = harness.step(
            new=[slot_init(1, self.PROMPT, PENALISED, start=32)],
            new_tokens=self.PROMPT,
            prefill=[(1, 32, 8)],
            sample=[(0, 1)],
            blocks=[(1, block) for block in harness.tables[1]] + harness.blocks_for(1, 48),
        )
        output = self.rest(harness, tokens, 1)
        assert len(seen[1]) == self.COUNT
        self.check(seen[1], output)

    def test_steps_in_flight(self, harness: Harness, seen: Any) -> None:
        """No step waits for the result of the one before."""
        output = harness.start({0: self.PROMPT}, PENALISED, room=self.COUNT)
        steps = [make_step(number, decode=[0], sample=[(0, 0)]) for number in range(2, self.COUNT + 1)]
        launched = [harness.runner.launch(step) for step in steps]
        self.check(seen[0], output + [int(step.wait().tokens[0]) for step in launched])

    def test_neighbours_come_and_go(self, harness: Harness, seen: Any) -> None:
        output = harness.start({0: self.PROMPT}, PENALISED)
        other = SamplingParams(temperature=0.9, seed=3, frequency_penalty=2.0, logit_bias=[(6, 5.0)])
        while len(output) < self.COUNT:
            slot = 1 + len(output) % 3
            harness.start({slot: self.PROMPT[: 5 * slot]}, other)
            output += harness.decode([0, slot], len(self.PROMPT) + len(output))[:1]
            harness.step(released=[slot])
            harness.tables.pop(slot)
        assert len(seen[0]) == self.COUNT
        self.check(seen[0], output)

    def test_neutral_is_plain(self, harness: Harness, seen: Any) -> None:
        neutral = replace(PENALISED, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        harness.generate(self.PROMPT, self.COUNT, params=neutral)
        assert all(torch.equal(before, after) for before, after in seen[0])

    def test_forced_and_restricted(self, harness: Harness) -> None:
        forced = SamplingParams(temperature=0.0, max_tokens=None, logit_bias=[(VOCABULARY - 1, 100.0)])
        assert set(harness.generate(self.PROMPT, 5, params=forced)) == {VOCABULARY - 1}
        few = SamplingParams(temperature=3.0, max_tokens=None, seed=1, allowed_token_ids=[6, 8, VOCABULARY - 1])
        assert set(harness.generate(self.PROMPT, 30, slot=1, params=few)) == {6, 8, VOCABULARY - 1}
