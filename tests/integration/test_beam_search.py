"""Beam search over HTTP and from Python finds what transformers finds, in float32 on a tiny model."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from runner_harness import beam_search, reference_model
from tiny_models import TinyModels

from headrace import LLM, BeamSearchParams
from tests.integration.streams import COMPLETIONS, Joined, stream_of

WIDTH, OUTPUT = 4, 14
LENGTHS = (1, 7, 15, 16, 17, 33)


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> pathlib.Path:
    return tiny_models.folder("llama")


@pytest.fixture(scope="module")
def llm(model: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", threads=1, num_gpu_blocks_override=400) as made:
        yield made


def prompt_of(length: int) -> list[int]:
    return [5 + (7 * length + 3 * place) % 200 for place in range(length)]


def expected(
    model: pathlib.Path, prompt: list[int], *, eos_token_id: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """The generated ids of transformers, best first, up to the end of sequence."""
    reference = reference_model(model)
    ends = reference.generation_config.eos_token_id
    ends = (ends if isinstance(ends, list) else [] if ends is None else [ends]) + (eos_token_id or [])
    found = beam_search(reference, prompt, WIDTH, OUTPUT, eos_token_id=ends or None, **options)
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        outputs.append(row[: end + 1])
    return outputs


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_llm_finds_what_transformers_finds(
    llm: LLM, model: pathlib.Path, length_penalty: float, early_stopping: bool | str
) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    params = BeamSearchParams(
        WIDTH, OUTPUT, length_penalty=length_penalty, early_stopping=early_stopping, include_stop_str_in_output=True
    )
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        ids = [sequence.tokens[len(prompt) :] for sequence in output.sequences]
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        assert ids == expected(model, prompt, **options), len(prompt)
        found = list(zip(output.sequences, ids, strict=True))
        scores = [sequence.cum_logprob / len(each) ** length_penalty for sequence, each in found]
        assert scores == sorted(scores, reverse=True)
        assert all(len(sequence.logprobs) == len(each) for sequence, each in found)


def test_texts_and_refusals(llm: LLM) -> None:
    [output] = llm.beam_search("The water", BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    for sequence in output.sequences:
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
        assert (sequence.finish_reason, len(sequence.logprobs)) == ("length", 3)
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []
    for bad in ({"beam_width": 0}, {"beam_width": 17}, {"temperature": 0.7}, {"early_stopping": "soon"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            llm.beam_search("x", BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | bad)))


def test_over_http_with_stop_tokens_and_in_a_stream(serving: Any, model: pathlib.Path) -> None:
    prompt = prompt_of(17)
    every = expected(model, prompt)
    stops = [every[0][4], every[1][9], every[3][2]]
    with serving(str(model), "--dtype", "float32", "--num-gpu-blocks-override", "400", "--threads", "1") as server:
        body = {"prompt": prompt, "max_tokens": OUTPUT, "return_token_ids": True, "use_beam_search": True}
        answer = server.post(COMPLETIONS, {**body, "n": 2, "beam_width": WIDTH, "logprobs": 1})
        assert [choice["token_ids"] for choice in answer["choices"]] == every[:2]
        assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [len(ids) for ids in every[:2]]
        assert answer["usage"]["completion_tokens"] == sum(map(len, every[:2]))
        reasons: set[str] = set()
        for options in ({"early_stopping": True}, {"length_penalty": 2.0}, {"early_stopping": "never"}):
            chunks = stream_of(server, COMPLETIONS, {**body, "n": WIDTH, "stop_token_ids": stops, **options})
            joined = Joined(chunks)
            found = expected(model, prompt, eos_token_id=stops, **options)
            assert [joined.token_ids[index] for index in range(WIDTH)] == found
            reasons |= set(joined.finish.values())
        assert reasons == {"stop", "length"}
        server.wait_idle(10)
