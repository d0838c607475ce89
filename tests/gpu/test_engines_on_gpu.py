"""Whole engines in their own processes on a GPU: the ids of transformers, with graphs and without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import reference_greedy
from tiny_models import ARCHITECTURES, TinyModels

from headrace import LLM, RequestOutput, SamplingParams

ON_GPU = torch.cuda.is_available()
OUTPUT = 40 if ON_GPU else 12
PROMPTS = [[5 + (7 * index + 3 * place) % 300 for place in range(1 + 23 * index % 150)] for index in range(12)]
NEAR_TIE = 0.25
"""Nats between the two most probable tokens that rounding in bfloat16 may turn round."""


def generate(folder: Path, *, logprobs: int | None = None, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=logprobs)
    known: dict[str, Any] = {
        "device": "cuda" if ON_GPU else "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 10,
        "num_gpu_blocks_override": 200,
        "kv_cache_bytes": 2**26,
        "threads": 1,
    }
    with LLM(str(folder), **known, **options) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_are_those_of_transformers(tiny_models: TinyModels, architecture: str, enforce_eager: bool) -> None:
    folder = tiny_models.folder(architecture)
    expected = [reference_greedy(folder, prompt, OUTPUT) for prompt in PROMPTS]
    assert ids_of(generate(folder, dtype="float32", enforce_eager=enforce_eager)) == expected


@pytest.mark.parametrize(("architecture", "cache"), [*((name, "auto") for name in ARCHITECTURES), ("qwen3", "fp8")])
def test_graphs_and_eager_agree_in_bfloat16(tiny_models: TinyModels, architecture: str, cache: str) -> None:
    """To the bit, where rows don't depend on each other."""
    folder = tiny_models.folder(architecture)
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True, "kv_cache_dtype": cache}
    graphs, eager = (ids_of(generate(folder, enforce_eager=eager, **options)) for eager in (False, True))
    assert graphs == eager


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_graphs_and_eager_differ_at_near_ties_only(tiny_models: TinyModels, head_dim: int) -> None:
    """Where padding may decide otherwise. Heads of 64 and 128 take the prefill kernel for Hopper."""
    folder = tiny_models.folder("qwen3", head_dim=head_dim)
    graphs, eager = (
        generate(folder, dtype="bfloat16", enforce_eager=enforce_eager, logprobs=5) for enforce_eager in (False, True)
    )
    for one, other in zip(graphs, eager, strict=True):
        first, second = one.outputs[0], other.outputs[0]
        pairs = zip(first.token_ids, second.token_ids, strict=True)
        place = next(itertools.compress(itertools.count(), (a != b for a, b in pairs)), None)
        if place is not None:
            assert first.logprobs is not None
            entries = first.logprobs[place]
            gap = entries[first.token_ids[place]].logprob - entries[second.token_ids[place]].logprob
            assert gap < NEAR_TIE, f"token {place} of a prompt of {len(one.prompt_token_ids)}"
