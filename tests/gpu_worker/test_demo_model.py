"""The built-in model against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_harness import Harness, make_runner, reference_logits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_worker.runner import ModelRunner
from shared.gguf_header import read_gguf_header
from shared.model_source import resolve_model

QUESTIONS = (
    "What is the capital of France?",
    "Name the planets of the solar system.",
    "Write a haiku about autumn.",
)
CLEAR = 0.1
"""Gap between the two best logits from which on rounding must not change the order."""
COUNT = 48


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("demo").path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    metadata = read_gguf_header(model).metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return made


@pytest.fixture(scope="module")
def runner(model: Path) -> ModelRunner:
    return make_runner(model, dtype="auto")


def prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_is_bfloat16_by_default(runner: ModelRunner) -> None:
    assert runner.cache.tensor.dtype == torch.bfloat16


def test_answers_with_paris(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    runner.reset()
    output = Harness(runner).generate(prompt(tokenizer, QUESTIONS[0]), 12)
    assert "Paris" in tokenizer.decode(output)


@pytest.mark.parametrize("question", QUESTIONS)
def test_top_1_is_that_of_float32_wherever_it_is_clear(
    runner: ModelRunner, model: Path, tokenizer: Tokenizer, question: str
) -> None:
    runner.reset()
    ids = prompt(tokenizer, question)
    output = Harness(runner).generate(ids, COUNT)
    expected = reference_logits(model, ids + output[:-1])[len(ids) - 1 :]
    best = expected.topk(2, -1)
    clear = best.values[:, 0] - best.values[:, 1] > CLEAR
    assert int(clear.sum()) > COUNT // 2
    assert torch.equal(torch.tensor(output)[clear], best.indices[clear, 0])
