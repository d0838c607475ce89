"""Bad words: never completed, however they are spelled, and never more than that."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from runner_harness import Harness, make_runner, slot_init
from tiny_models import VOCABULARY, TinyModels
from transformers import NoBadWordsLogitsProcessor

from gpu_worker.sampling.bad_words import BadWords
from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.sampler import Sampler
from shared.sampling import SamplingParams

VOCAB, LENGTH = 300, 48
CPU = torch.device("cpu")


def rows_of(*texts: list[int], outputs: int = 0) -> SampleRows:
    """Row i: slot i, which holds the i-th text among stale tokens."""
    token_ids = torch.full((len(texts), LENGTH), 3, dtype=torch.int32)
    for slot, ids in enumerate(texts):
        token_ids[slot, : len(ids)] = torch.tensor(ids)
    lengths = np.array([len(ids) for ids in texts], np.int64)
    return SampleRows(
        np.arange(len(texts)), np.full(len(texts), outputs), torch.from_numpy(lengths), lengths, token_ids
    )


def banning(*words: list[int], **changes: Any) -> SamplingParams:
    return SamplingParams(bad_words_token_ids=list(words), **changes)


def test_logits_are_those_of_transformers() -> None:
    """Random words over few ids, so that prefixes occur; rows of different lengths, some without words."""
    draw = random.Random(5)
    texts = [draw.choices(range(4), k=draw.randint(1, LENGTH)) for _ in range(40)]
    words = [[draw.choices(range(4), k=draw.randint(1, 6)) for _ in range(draw.randint(0, 12))] for _ in texts]
    component, logits = BadWords(CPU), torch.randn(len(texts), VOCAB, generator=torch.Generator().manual_seed(0))
    for slot, banned in enumerate(words):
        component.add(slot_init(slot, [1], banning(*banned)))
    for order in (range(40), range(39, -1, -1), range(0, 40, 3)):
        index = np.array(order)
        found = logits[index].clone()
        component.apply(found, rows_of(*texts).select(index))
        for row, slot in enumerate(order):
            wanted = logits[[slot]]
            if words[slot]:
                wanted = NoBadWordsLogitsProcessor(words[slot])(torch.tensor([texts[slot]]), wanted)
            assert torch.equal(found[row], wanted[0])


def test_words_that_end_alike_and_a_word_twice() -> None:
    """Of two words with the same last id one is being completed and the other is not; the order does not matter."""
    for words in ([[5, 9], [6, 9]], [[6, 9], [5, 9]], [[5, 9], [5, 9]]):
        component, logits = BadWords(CPU), torch.zeros(1, VOCAB)
        component.add(slot_init(0, [5], banning(*words)))
        component.apply(logits, rows_of([1, 5]))
        assert torch.isneginf(logits[0]).nonzero()[:, 0].tolist() == [9]


def test_a_word_longer_than_the_text_is_not_completed() -> None:
    component, logits = BadWords(CPU), torch.zeros(1, VOCAB)
    component.add(slot_init(0, [5], banning([3, 3, 5, 9], [5, 8])))
    component.apply(logits, rows_of([5]))
    assert torch.isneginf(logits[0]).nonzero()[:, 0].tolist() == [8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_keeps_a_token_when_all_allowed_ones_are_bad(temperature: float) -> None:
    """[allowed, bad words, expected]: bad words give way as a whole, and so does min_tokens after them."""
    sampler = Sampler(3, VOCAB)
    common: dict[str, Any] = {"temperature": temperature, "seed": 1, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    cases = [([7, 8], [[7], [5, 8]], [5], {7, 8}), ([7, 8], [[7], [6, 8]], [5], {8}), ([2, 8], [[8]], [5], {2})]
    for slot, (allowed, words, _, _) in enumerate(cases):
        params = banning(*words, allowed_token_ids=allowed, min_tokens=3, **common)
        sampler.add(slot_init(slot, [5], params))
    for seed in range(20):
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
        tokens = sampler.sample(logits, rows_of(*(text for _, _, text, _ in cases)))
        assert not logits.isnan().any()
        for token, (_, _, _, expected) in zip(tokens.tolist(), cases, strict=True):
            assert token in expected


def test_a_slot_forgets_the_words_of_its_last_request() -> None:
    component, logits = BadWords(CPU), torch.zeros(2, VOCAB)
    for words in ([[5], [6]], [[7]], []):
        component.add(slot_init(0, [1], banning(*words)))
        component.add(slot_init(1, [1], banning([9])))
        found = logits.clone()
        component.apply(found, rows_of([1], [1]))
        assert torch.isneginf(found[0]).nonzero()[:, 0].tolist() == [word[0] for word in words]
        assert torch.isneginf(found[1]).nonzero()[:, 0].tolist() == [9]


class TestGeneration:
    """One word in two forms: three ids without a space before it, a single id with one."""

    BARE: ClassVar = [50, 51, 52]
    SPACED: ClassVar = [60]
    PROMPT: ClassVar = [10, 11, 12, 50, 51]

    def wanting(self, *favourites: int, **changes: Any) -> SamplingParams:
        """A request whose model wants these ids above all others."""
        bias = [(token, 30.0) for token in favourites]
        return SamplingParams(temperature=0.0, max_tokens=None, logit_bias=bias, **changes)

    def test_neither_form_appears_in_any_choice(self, tiny_models: TinyModels) -> None:
        harness = Harness(make_runner(tiny_models.folder("llama")))
        params = self.wanting(*self.BARE, *self.SPACED, bad_words_token_ids=[self.BARE, self.SPACED])
        params = dataclasses.replace(params, temperature=1.0, seed=3)
        slots = range(4)
        blocks = [pair for slot in slots for pair in harness.blocks_for(slot, 60)]
        new = [slot_init(slot, self.PROMPT, params, choice=slot) for slot in slots]
        tokens = harness.step(
            new=new,
            new_tokens=self.PROMPT * 4,
            prefill=[(slot, 0, len(self.PROMPT)) for slot in slots],
            sample=list(enumerate(slots)),
            blocks=blocks,
        )
        texts = [[*self.PROMPT, token] for token in tokens]
        for _ in range(50):
            for text, token in zip(texts, harness.decode(slots, 60), strict=True):
                text.append(token)
        for text in texts:
            assert 60 not in text
            triples = list(zip(text, text[1:], text[2:], strict=False))
            assert tuple(self.BARE) not in triples
            assert any(triple[:2] == (50, 51) for triple in triples[3:]), "it was on its way to the word"
            assert 52 in text, "a piece of the word remains possible elsewhere"
        assert len({tuple(text) for text in texts}) == 4

    def test_the_prefix_may_lie_in_the_prompt(self, tiny_models: TinyModels) -> None:
        harness = Harness(make_runner(tiny_models.folder("llama")))
        free = harness.generate(self.PROMPT, 1, 0, self.wanting(52))
        held = harness.generate(self.PROMPT, 1, 1, self.wanting(52, bad_words_token_ids=[self.BARE]))
        elsewhere = harness.generate(self.PROMPT[:-1], 1, 2, self.wanting(52, bad_words_token_ids=[self.BARE]))
        assert (free, elsewhere) == ([52], [52])
        assert held != [52]
        assert held[0] < VOCABULARY
