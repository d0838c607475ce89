"""``kv_cache_dtype="fp8"`` in real processes: the same answers whatever happens to the cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyModels, with_kv_scales

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": 400}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(37 * index + 11 * salt) % 300 + 20 for index in range(20 + 9 * salt)] for salt in range(6)]
TEXT = (
    "A mill race is the channel that carries water to a wheel. The part above the wheel is called the headrace, and "
    "the part below it, through which the water leaves, is called the tailrace. Water mills ground grain for most of "
    "recorded history: the Romans built them along rivers in Gaul, and monks in the Middle Ages used them to saw wood, "
    "to full cloth and to drive the hammers of a forge. When steam engines arrived in the eighteenth century, many "
    "mills were slow to change, because the river cost nothing and the engine burned coal every day."
)


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scales = {"k_proj.k_scale": torch.tensor(0.5), "v_proj.v_scale": torch.tensor([4.0])}
    return with_kv_scales(tiny_models.folder("llama"), tmp_path_factory.mktemp("scaled") / "model", scales)


@contextlib.contextmanager
def running(model: str, cache_dtype: str, **options: Any) -> Iterator[LLM]:
    with LLM(model, kv_cache_dtype=cache_dtype, **{**OPTIONS, **options}) as llm:
        yield llm


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def value_of(llm: LLM, name: str) -> float:
    return sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == name)


def test_hits_chunks_and_a_small_pool_give_the_same_ids(model: Path) -> None:
    with running(str(model), "fp8", enable_prefix_caching=False) as llm:
        fresh = ids_of([llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS])
    with running(str(model), "fp8", num_gpu_blocks_override=16, max_num_batched_tokens=24) as llm:
        assert ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == fresh
        for prompt, ids in zip(PROMPTS, fresh, strict=True):
            assert ids_of(llm.generate([prompt, prompt], GREEDY, use_tqdm=False)) == [ids, ids]
        assert value_of(llm, "vllm:prefix_cache_hits") > 0


def perplexity(cache_dtype: str) -> float:
    with running("demo", cache_dtype, dtype="bfloat16", max_model_len=512) as llm:
        [output] = llm.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    entries = zip((output.prompt_logprobs or [])[1:], output.prompt_token_ids[1:], strict=True)
    logprobs = [entry[token].logprob for entry, token in entries if entry is not None]
    assert len(logprobs) > 100
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.slow
def test_perplexity_is_within_two_percent(capfd: pytest.CaptureFixture[str]) -> None:
    expected = perplexity("auto")
    assert perplexity("fp8") == pytest.approx(expected, rel=0.02)
    assert capfd.readouterr().err.count("lacks scales") == 1
