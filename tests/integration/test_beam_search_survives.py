"""Processes are killed while an ``LLM`` searches; what it finds is what it finds undisturbed."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import TinyModels
from waiting import wait_until

from headrace import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from shared.config import ENGINE, TOKENIZER, WORKER

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": 400, "batch_invariant": True}
PROMPTS = [f"The water wheel number {i} turns" for i in range(4)]
PARAMS = BeamSearchParams(3, 120, ignore_eos=True)
OTHERS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=250, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(str(tiny_models.folder("qwen3")), **OPTIONS) as made:
        yield made


def work(llm: LLM, disturb: Callable[[], None] = lambda: None) -> tuple[list[BeamSearchOutput], list[list[int]]]:
    """What searches and ordinary requests beside them give; ``disturb`` is called while all of them run."""
    with ThreadPoolExecutor(2) as pool:
        searches = pool.submit(llm.beam_search, PROMPTS, PARAMS)
        others = pool.submit(llm.generate, PROMPTS, OTHERS, use_tqdm=False)
        _until(lambda: in_the_middle(llm))
        disturb()
        assert not searches.done()
        assert not others.done()
        return searches.result(90), [output.outputs[0].token_ids for output in others.result(90)]


def in_the_middle(llm: LLM) -> bool:
    """Whether all run: ordinary requests have many of their rows, searches none."""
    jobs = [job for job in list(llm._session.link._jobs.values()) if job.request]
    rows = sorted(sum(len(log.ids) for log in job.request.logs) for job in jobs)
    return len(rows) == 8 and rows[4] >= 25


_until = functools.partial(wait_until, seconds=60.0, every_s=0.002)


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> Any:
    return work(llm)


@pytest.mark.parametrize("service", [TOKENIZER, ENGINE, WORKER])
def test_a_process_is_killed_during_searches(llm: LLM, undisturbed: Any, service: str) -> None:
    before, killed = llm._session.pids(), set()

    def kill() -> None:
        for name, pid in before.items():
            if name.partition("/")[0] == service:
                os.kill(pid, signal.SIGKILL)
                killed.add(name)

    assert work(llm, kill) == undisturbed
    _until(lambda: llm._session.pids().keys() == before.keys())
    assert {name for name, pid in llm._session.pids().items() if pid != before[name]} == killed


def test_a_bound_on_searches_at_the_same_time(llm: LLM, undisturbed: Any) -> None:
    most = 0
    with ThreadPoolExecutor(1) as pool:
        searches = pool.submit(llm.beam_search, PROMPTS, PARAMS, concurrency_limit=2)
        while not searches.done():
            most = max(most, len(llm._session.link._jobs))
            time.sleep(0.001)
    assert searches.result() == undisturbed[0]
    assert most == 2
    with pytest.raises(ValueError, match="concurrency_limit must be at least 1"):
        llm.beam_search(PROMPTS, PARAMS, concurrency_limit=0)


def test_outputs_are_whole(llm: LLM, undisturbed: Any) -> None:
    """As vLLM's scripts read them."""
    for prompt, output in zip(PROMPTS, undisturbed[0], strict=True):
        prompt_ids = llm.tokenize(prompt)
        scores = [sequence.cum_logprob / 120 for sequence in output.sequences]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        for sequence in output.sequences:
            ids = sequence.tokens[len(prompt_ids) :]
            assert sequence.tokens[: len(prompt_ids)] == prompt_ids
            assert sequence.text == llm.detokenize(sequence.tokens)
            own = [entry[token].logprob for entry, token in zip(sequence.logprobs, ids, strict=True)]
            assert sequence.cum_logprob == pytest.approx(sum(own))
            assert all(len(entry) in (6, 7) for entry in sequence.logprobs)
