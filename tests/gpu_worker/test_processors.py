"""Logits after sampling features, alone and in pairs, are those of transformers, whatever a slot went through.

A runner generates for one request of each feature and of each pair of features, all in one batch. At every step the
sampler's components are applied to what the model gave, with the state that the runner has for its rows, and compared
with the processors of transformers applied to the known tokens in the documented order.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from runner_harness import Harness, make_runner, slot_init
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.noise import gumbel
from shared.sampling import SamplingParams

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PROMPT = random.Random(4).choices(range(5, 40), k=40)
END, STOPS = 2, [17, 90]
NEW_TOKENS = 9
BIASES = [(17, 6.0), (PROMPT[3], -4.0), (301, 2.5)]
ALLOWED = list(range(0, VOCABULARY, 2))
BANNED = [[9], [PROMPT[-1], 12], [*PROMPT[-2:], 16], [PROMPT[0], 18], *([token, 20] for token in range(0, 360, 3))]


def output_penalty(presence: float = 0.0, frequency: float = 0.0) -> Processor:
    """transformers has none for generated tokens: OpenAI's formula."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(ids[0, len(PROMPT) :].tolist()).items():
            scores[0, token] -= frequency * count + presence
        return scores

    return process


# In the documented order: name -> (parameters, processor).
FEATURES: dict[str, tuple[dict[str, Any], Processor]] = {
    "allowed_token_ids": (
        {"allowed_token_ids": ALLOWED},
        hf.PrefixConstrainedLogitsProcessor(lambda *_: ALLOWED, num_beams=1),
    ),
    "bad_words": ({"bad_words_token_ids": BANNED}, hf.NoBadWordsLogitsProcessor(BANNED)),
    "min_tokens": (
        {"min_tokens": 5, "stop_token_ids": STOPS},
        hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [END, *STOPS]),
    ),
    "logit_bias": (
        {"logit_bias": BIASES},
        hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIASES]),
    ),
    "repetition_penalty": ({"repetition_penalty": 1.5}, hf.RepetitionPenaltyLogitsProcessor(1.5)),
    "frequency_penalty": ({"frequency_penalty": 0.5}, output_penalty(frequency=0.5)),
    "presence_penalty": ({"presence_penalty": 1.0}, output_penalty(presence=1.0)),
    "temperature": ({"temperature": 0.7}, hf.TemperatureLogitsWarper(0.7)),
    "min_p": ({"min_p": 0.02}, hf.MinPLogitsWarper(0.02)),
    "top_k": ({"top_k": 20}, hf.TopKLogitsWarper(20)),
    "top_p": ({"top_p": 0.8}, hf.TopPLogitsWarper(0.8)),
}
SETS = [(name,) for name in FEATURES] + list(itertools.combinations(FEATURES, 2))
SLOTS = range(len(SETS))


def params_of(slot: int) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": slot, "max_tokens": None}
    for name in SETS[slot % len(SETS)]:
        fields |= FEATURES[name][0]
    return SamplingParams(**fields)


class Watched:
    """A runner whose every sampled row is compared when it is sampled; it keeps what each slot generated."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.outputs: dict[int, list[int]] = {}
        self.compared = 0
        sample = harness.runner.sampler.sample

        def compare(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
            before, shaped = logits.clone(), logits.clone()
            sampler = harness.runner.sampler
            for component in (*sampler.constraints, *sampler.shapers):
                component.apply(shaped, rows)
            tokens = sample(logits, rows)
            for row, slot in enumerate(rows.slots.tolist()):
                output = self.outputs.setdefault(slot, [])
                self.check(slot, before[[row]], shaped[row], PROMPT + output)
                noise = gumbel(torch.tensor([slot]), torch.tensor([0]), rows.positions[[row]], VOCABULARY)
                assert int(tokens[row]) == int((shaped[row] + noise[0]).argmax())
                output.append(int(tokens[row]))
            return tokens

        harness.runner.sampler.sample = compare  # type: ignore[method-assign]

    def check(self, slot: int, scores: torch.Tensor, found: torch.Tensor, ids: Sequence[int]) -> None:
        names = SETS[slot % len(SETS)]
        for name in names:
            scores = FEATURES[name][1](torch.tensor([ids]), scores)
        wanted = scores[0]
        assert torch.equal(torch.isneginf(found), torch.isneginf(wanted)), names
        assert not found.isnan().any()
        finite = torch.isfinite(wanted)
        assert torch.allclose(found[finite], wanted[finite], rtol=1e-6, atol=1e-6), names
        self.compared += 1

    def begin(self, slots: Sequence[int], chunk: int, **changes: Any) -> None:
        """Requests take slots with what they have so far; it is computed in chunks, then a token is sampled."""
        known = {slot: PROMPT + self.outputs.get(slot, []) for slot in slots}
        start, harness = changes.get("start", 0), self.harness
        parts: dict[str, Any] = {
            "new": [slot_init(s, known[s], params_of(s), prompt_len=len(PROMPT), **changes) for s in slots],
            "new_tokens": [token for slot in slots for token in known[slot]],
            "blocks": [pair for slot in slots for pair in harness.blocks_for(slot, len(known[slot]))],
        }
        if start:
            shared = [(slot, block) for slot in slots for block in harness.tables[slot][: start // 16]]
            parts["blocks"] = shared + parts["blocks"]
        for first in range(start, max(map(len, known.values())), chunk):
            rows = [s for s in slots if first < len(known[s])]
            harness.step(
                **parts,
                prefill=[(s, first, min(chunk, len(known[s]) - first)) for s in rows],
                sample=[(row, s) for row, s in enumerate(rows) if first + chunk >= len(known[s])],
            )
            parts = {}

    def decode(self, slots: Sequence[int], times: int = NEW_TOKENS - 1) -> None:
        for _ in range(times):
            self.harness.decode(slots, len(PROMPT) + max(len(self.outputs[slot]) for slot in slots))

    def leave(self, slots: Sequence[int]) -> None:
        self.harness.step(released=list(slots))
        for slot in slots:
            self.harness.tables.pop(slot)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its logits have a standard deviation of about 3, so that no feature is without effect."""
    return TinyModels(tmp_path_factory.mktemp("processors")).folder("llama", num_hidden_layers=2)


@pytest.fixture
def watched(folder: Any) -> Watched:
    return Watched(Harness(make_runner(folder, num_slots=2 * len(SETS), num_blocks_override=1 + 10 * len(SETS))))


@pytest.mark.parametrize("chunk", [7, 40])
def test_pairs_with_a_prompt_in_chunks(watched: Watched, chunk: int) -> None:
    watched.begin(SLOTS, chunk)
    watched.decode(SLOTS)
    assert watched.compared == len(SETS) * NEW_TOKENS


def test_pairs_after_preemption(watched: Watched) -> None:
    """Every other request gives up its slot after 4 tokens, and takes it again with what it has."""
    watched.begin(SLOTS, 40)
    watched.decode(SLOTS, 3)
    preempted = SLOTS[::2]
    watched.leave(preempted)
    watched.begin(preempted[::-1], 16)
    watched.decode(SLOTS, NEW_TOKENS - 5)
    assert watched.compared == len(SETS) * (NEW_TOKENS - 1) + len(preempted)


def test_pairs_after_a_prefix_hit(watched: Watched) -> None:
    """All requests start at the end of two full blocks that another one computed."""
    other = len(SETS)
    watched.begin([other], 40)
    for slot in SLOTS:
        watched.harness.tables[slot] = watched.harness.tables[other][:2]
    watched.begin(SLOTS, 40, start=32)
    watched.decode(SLOTS)
    assert watched.compared == 1 + len(SETS) * NEW_TOKENS


def test_pairs_with_neighbours_that_join_and_leave_at_every_step(watched: Watched) -> None:
    """Each step a few requests join, in some order, and a few leave after their last token."""
    waiting, running = list(SLOTS), [SLOTS[0]]
    random.Random(1).shuffle(waiting)
    waiting.remove(SLOTS[0])
    watched.begin(running, 40)
    while running:
        joining, waiting = waiting[:9], waiting[9:]
        if joining:
            watched.begin(joining, 25)
        running = joining[::2] + running + joining[1::2]
        leaving = [slot for slot in running if len(watched.outputs[slot]) >= 5]
        if leaving:
            watched.leave(leaving)
        running = [slot for slot in running if slot not in leaving]
        if running:
            watched.decode(running, 1)
    assert watched.compared >= 5 * len(SETS)


def test_every_feature_changes_something(watched: Watched) -> None:
    """Or the comparison would show nothing."""
    harness, changed = watched.harness, Counter[str]()
    sampler = harness.runner.sampler
    for component in (*sampler.constraints, *sampler.shapers):

        def counted(
            logits: torch.Tensor, rows: SampleRows, component: Any = component, apply: Any = component.apply
        ) -> None:
            before = logits.clone()
            apply(logits, rows)
            changed[type(component).__name__] += int((before != logits).any(-1).sum())

        component.apply = counted  # type: ignore[method-assign]
    watched.begin(SLOTS, 40)
    watched.decode(SLOTS, 3)
    assert all(changed[type(c).__name__] > 20 for c in (*sampler.constraints[1:], *sampler.shapers)), changed


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_which_tokens_a_penalty_sees(folder: Any, field: str) -> None:
    """A word three times, then three tokens: the prompt counts for repetition, from the first step on, and no other."""
    value = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}[field]
    harness = Harness(make_runner(folder))
    prompt, output = [31, 32, 31, 32, 31, 32], list[int]()
    sample, step = harness.runner.sampler.sample, iter(range(3))

    def compare(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        wanted = logits[0].clone()
        next(step)
        for token in {*prompt, *output} if field == "repetition_penalty" else {*output}:
            if field == "repetition_penalty":
                wanted[token] = wanted[token] / value if wanted[token] > 0 else wanted[token] * value
            else:
                wanted[token] -= value * (output.count(token) if field == "frequency_penalty" else 1)
        tokens = sample(logits, rows)
        assert torch.allclose(logits[0], wanted, rtol=1e-6, atol=1e-6)
        output.append(int(tokens[0]))
        return tokens

    harness.runner.sampler.sample = compare  # type: ignore[method-assign]
    harness.generate(prompt, 3, params=SamplingParams(temperature=0.0, max_tokens=3, **{field: value}))
    assert len(output) == 3
    assert next(step, None) is None


def test_neutral_values_change_no_bit_and_no_draw(folder: Any) -> None:
    harness = Harness(make_runner(folder))
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=None)
    neutral = SamplingParams(
        temperature=1.0, seed=5, max_tokens=None, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        top_k=-1, top_p=1.0, min_p=0.0, logit_bias=[], allowed_token_ids=None, bad_words_token_ids=[], min_tokens=0,
    )  # fmt: skip
    outputs = []
    for slot, params in enumerate((plain, neutral)):
        outputs.append(harness.generate(PROMPT, 12, slot, params))
        rows = SampleRows(
            np.array([slot]), np.array([12]), torch.tensor([52]), np.array([52]), torch.zeros(2, 64).int()
        )
        logits = torch.randn(1, VOCABULARY)
        shaped = logits.clone()
        for component in (*harness.runner.sampler.constraints, *harness.runner.sampler.shapers):
            component.apply(shaped, rows)
        assert torch.equal(shaped, logits)
    assert outputs[0] == outputs[1]
