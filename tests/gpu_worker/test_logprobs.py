"""Log-probability records of sampled tokens and of prompts against transformers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import EPOCH, Harness, make_runner, make_step, reference_logits, slot_init
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.result_sender import ResultSender
from gpu_worker.sampling.logprobs import Distributions
from gpu_worker.sampling.most_probable import most_probable
from gpu_worker.sampling.prompt_logprobs import SLICE
from shared.logprobs import Logprobs, unpack
from shared.messages import StepResult
from shared.sampling import SamplingParams

PROMPT = random.Random(2).choices(range(5, 300), k=50)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TinyModels(tmp_path_factory.mktemp("logprobs")).folder("llama", num_hidden_layers=2, initializer_range=0.1)


@pytest.fixture
def harness(folder: Any) -> Harness:
    return Harness(make_runner(folder))


def check(record: bytes, logits: torch.Tensor, token: int, count: int) -> None:
    """A record is that of ``token`` under transformers' ``logits`` [vocabulary]."""
    found, wanted = unpack(record), logits.log_softmax(-1)
    assert found.token.token_id == token
    assert found.token.logprob == pytest.approx(float(wanted[token]), abs=1e-5)
    assert found.rank == 1 + int((wanted > wanted[token]).sum())
    values, ids = wanted.topk(count)
    assert [entry.token_id for entry in found.top] == ids.tolist()
    assert [entry.logprob for entry in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def asking(count: int | None, **changes: Any) -> SamplingParams:
    return dataclasses.replace(GREEDY, logprobs=count, **changes)


class TestSampledTokens:
    MIXED = (
        asking(0),
        asking(None),
        asking(20),
        asking(3, temperature=1.3, seed=4, top_k=40, top_p=0.9, min_p=0.01),
        asking(5, repetition_penalty=1.8, presence_penalty=1.0, logit_bias=[(8, 50.0)], allowed_token_ids=[8, 9, 70]),
        asking(None, temperature=1.0, seed=2),
        asking(1, bad_words_token_ids=[[3], [4]], min_tokens=3, stop_token_ids=[9]),
    )

    def test_rows_that_want_different_numbers_or_none(self, folder: Any, harness: Harness) -> None:
        """Each is told about the model's own logits, whatever its own parameters did to them."""
        slots = range(len(self.MIXED))
        outputs: dict[int, list[int]] = {slot: [] for slot in slots}
        records: dict[int, list[bytes]] = {slot: [] for slot in slots}

        def take(tokens: list[int], order: list[int]) -> None:
            assert harness.output is not None
            for slot, token in zip(order, tokens, strict=True):
                outputs[slot].append(token)
            wanted = [row for row, slot in enumerate(order) if self.MIXED[slot].logprobs is not None]
            assert [row for row, _ in harness.output.logprobs] == wanted
            for row, record in harness.output.logprobs:
                records[order[row]].append(record)

        blocks = [pair for slot in slots for pair in harness.blocks_for(slot, 70)]
        new = [slot_init(slot, PROMPT, params) for slot, params in enumerate(self.MIXED)]
        prefill = [(slot, 0, len(PROMPT)) for slot in slots]
        tokens = harness.step(
            new=new, new_tokens=PROMPT * len(new), prefill=prefill, sample=list(enumerate(slots)), blocks=blocks
        )
        take(tokens, list(slots))
        for number in range(6):
            order = random.Random(number).sample(list(slots), len(slots))
            take(harness.decode(order, 70), order)
        for slot, params in enumerate(self.MIXED):
            logits = reference_logits(folder, PROMPT + outputs[slot])[len(PROMPT) - 1 :]
            assert len(records[slot]) == (0 if params.logprobs is None else 7)
            for index, record in enumerate(records[slot]):
                check(record, logits[index], outputs[slot][index], params.logprobs or 0)

    def test_asking_changes_no_token(self, harness: Harness) -> None:
        for slot, params in enumerate((GREEDY, dataclasses.replace(GREEDY, temperature=1.0, seed=7))):
            plain = harness.generate(PROMPT, 10, 2 * slot, params)
            asked = harness.generate(PROMPT, 10, 2 * slot + 1, dataclasses.replace(params, logprobs=20))
            assert plain == asked

    def test_after_a_prefix_hit_and_after_preemption(self, folder: Any, harness: Harness) -> None:
        harness.start({0: PROMPT})
        harness.tables[1] = harness.tables[0][:2]
        params, output = asking(4), list[int]()
        for _ in range(2):
            known = PROMPT + output
            blocks = [(1, block) for block in harness.tables[1]] + harness.blocks_for(1, 100)
            output += harness.step(
                new=[slot_init(1, known, params, start=32, prompt_len=len(PROMPT))],
                new_tokens=known,
                prefill=[(1, 32, len(known) - 32)],
                sample=[(0, 1)],
                blocks=blocks,
            )
            for _ in range(3):
                assert harness.output is not None
                logits = reference_logits(folder, PROMPT + output)[-2]
                check(harness.output.logprobs[0][1], logits, output[-1], 4)
                output += harness.decode([1], 100)
            harness.step(released=[1])
            harness.tables[1] = harness.tables[0][:2]

    def test_equal_logits_lowest_id_first(self) -> None:
        for vocab in (64, 5000):
            logits = torch.zeros(2, vocab)
            logits[0, [40, 7, 63, 12]] = torch.tensor([3.0, 3.0, 5.0, 3.0])
            logits[1, [50, 3]] = -0.0
            logits[1, 0] = -torch.inf
            record = Distributions(logits, 5).records(torch.tensor([12, 2]))
            assert record.ids.tolist() == [[12, 63, 7, 12, 40, 0], [2, 1, 2, 3, 4, 5]]
            assert record.ranks.tolist() == [2, 1]

    @pytest.mark.parametrize("vocab", [4, 31, 384, 1000, 4096, 4099])
    def test_most_probable_is_a_stable_sort(self, vocab: int) -> None:
        values = torch.randint(-4, 5, (40, vocab), generator=torch.Generator().manual_seed(1)).float()
        values[:, ::7] = -torch.inf
        for count in (1, 3, min(vocab, 20), min(vocab, 64), vocab):
            found, ids = most_probable(values, count)
            wanted, order = values.sort(dim=-1, descending=True, stable=True)
            assert torch.equal(found, wanted[:, :count])
            assert torch.equal(ids, order[:, :count])

    def test_more_than_the_vocabulary_has(self) -> None:
        record = Distributions(torch.randn(1, 8), 20).records(torch.tensor([5]))
        assert [len(unpack(one).top) for one in record.pack(np.array([20]))] == [8]


class TestPrompts:
    LONG = random.Random(3).choices(range(5, 300), k=2 * SLICE + 21)

    def scored(self, harness: Harness, prompt: list[int], chunk: int, count: int = 3) -> list[bytes]:
        """The records of a prompt that is computed in chunks, beside a neighbour that does not ask."""
        neighbour = [*PROMPT, 7]
        records: list[bytes] = []
        harness.start({5: neighbour})
        new = [slot_init(1, prompt, dataclasses.replace(GREEDY, prompt_logprobs=count))]
        parts: dict[str, Any] = {"new": new, "new_tokens": prompt, "blocks": harness.blocks_for(1, len(prompt))}
        for start in range(0, len(prompt), chunk):
            rows = [(5, 0, len(neighbour)), (1, start, min(chunk, len(prompt) - start))]
            harness.step(**parts, prefill=rows, sample=[(1, 1)] if start + chunk >= len(prompt) else [])
            assert harness.output is not None
            for row, some in harness.output.prompt_logprobs:
                assert row == 1
                records += some
            parts = {}
        return records

    @pytest.mark.parametrize("chunk", [1, 8, 1000])
    def test_chunks_of_any_size(self, folder: Any, harness: Harness, chunk: int) -> None:
        prompt = PROMPT if chunk == 1 else self.LONG
        records, logits = self.scored(harness, prompt, chunk), reference_logits(folder, prompt)
        assert len(records) == len(prompt) - 1
        for index, record in enumerate(records):
            check(record, logits[index], prompt[index + 1], 3)

    def test_requests_of_one_step_want_different_numbers(self, folder: Any, harness: Harness) -> None:
        wanted = {0: 20, 1: None, 2: 0, 3: 2}
        prompts = {0: self.LONG, 1: PROMPT, 2: PROMPT[:1], 3: PROMPT[::-1]}
        harness.step(
            new=[slot_init(s, prompts[s], dataclasses.replace(GREEDY, prompt_logprobs=wanted[s])) for s in prompts],
            new_tokens=[token for ids in prompts.values() for token in ids],
            prefill=[(slot, 0, len(ids)) for slot, ids in prompts.items()],
            blocks=[pair for slot, ids in prompts.items() for pair in harness.blocks_for(slot, len(ids))],
        )
        assert harness.output is not None
        assert len(harness.output.tokens) == 0
        assert [row for row, _ in harness.output.prompt_logprobs] == [0, 3], "one token has nothing to be told"
        for row, records in harness.output.prompt_logprobs:
            logits = reference_logits(folder, prompts[row])
            assert len(records) == len(prompts[row]) - 1
            for index, record in enumerate(records):
                check(record, logits[index], prompts[row][index + 1], wanted[row] or 0)

    def test_generated_tokens_are_not_the_prompt(self, harness: Harness) -> None:
        """A request that comes back after preemption: what it generated has no prompt records, nor has its decode."""
        params = dataclasses.replace(GREEDY, prompt_logprobs=0)
        known, found = [*PROMPT, 8, 9, 10], list[list[int]]()
        for start, count in ((0, 45), (45, 7), (52, 1)):
            parts: dict[str, Any] = {"prefill": [(0, start, count)]}
            if start == 0:
                parts["new"] = [slot_init(0, known, params, prompt_len=len(PROMPT))]
                parts |= {"new_tokens": known, "blocks": harness.blocks_for(0, 60)}
            harness.step(**parts, sample=[(0, 0)] if start == 52 else [])
            assert harness.output is not None
            found += [[unpack(record).token.token_id for record in some] for _, some in harness.output.prompt_logprobs]
        assert found == [PROMPT[1:46], PROMPT[46:]]
        harness.decode([0], 60)
        assert harness.output.prompt_logprobs == []

    def test_memory_is_bounded_by_a_slice(self, harness: Harness) -> None:
        widest, project = [0], harness.runner.model.logits

        def record(hidden: torch.Tensor) -> torch.Tensor:
            widest[0] = max(widest[0], len(hidden))
            return project(hidden)

        harness.runner.model.logits = record  # type: ignore[method-assign]
        assert len(self.scored(harness, self.LONG, 1000)) == len(self.LONG) - 1
        assert widest == [SLICE]


def test_the_result_message_carries_them(harness: Harness) -> None:
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    step = make_step(
        1,
        new=[slot_init(0, PROMPT, params)],
        new_tokens=PROMPT,
        prefill=[(0, 0, len(PROMPT))],
        sample=[(0, 0)],
        blocks=harness.blocks_for(0, len(PROMPT)),
    )
    sender = ResultSender(lambda: None, lambda: None, 1.0)  # type: ignore[arg-type, return-value]
    message = sender._message_of((EPOCH, harness.runner.launch(step)))
    assert isinstance(message, StepResult)
    [(row, record)], [(prefill_row, records)] = message.logprobs, message.prompt_logprobs
    assert (row, prefill_row, len(records)) == (0, 0, len(PROMPT) - 1)
    sampled: Logprobs = unpack(record)
    assert sampled.token.token_id == int(message.tokens[0]) < VOCABULARY
    assert (len(sampled.top), len(unpack(records[0]).top)) == (2, 1)
