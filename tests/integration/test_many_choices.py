"""As many choices of one prompt as a request may ask for: they share the prompt, and each has its own draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shared.sampling import MAX_CHOICES
from tests.integration.streams import CHAT, COMPLETIONS, Joined, refusal, stream_of

OUTPUT = 8
BODY: dict[str, Any] = {
    "prompt": "The mill stands where the river bends, and its wheel has turned for two hundred years because",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": OUTPUT,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator[Any]:
    with serving("demo", "--batch-invariant", "--max-num-seqs=256") as begun:
        yield begun


def ids_of(server: Any, **fields: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in server.post(COMPLETIONS, {**BODY, **fields})["choices"]]


def test_128_choices_compute_the_prompt_once(server: Any) -> None:
    names = {
        "prompt": "vllm:prompt_tokens_total",
        "forks": "headrace:forks_total",
        "generated": "vllm:generation_tokens_total",
        "computed": "vllm:iteration_tokens_total_sum",
    }
    server.wait_idle(10)
    before = {key: server.gauge(name) for key, name in names.items()}
    answer = server.post(COMPLETIONS, {**BODY, "n": MAX_CHOICES})
    server.wait_idle(10)
    counted = {key: server.gauge(name) - before[key] for key, name in names.items()}
    usage, length = answer["usage"], answer["usage"]["prompt_tokens"]
    assert 16 < length < 64
    assert (usage["completion_tokens"], usage["total_tokens"]) == (MAX_CHOICES * OUTPUT, length + MAX_CHOICES * OUTPUT)
    assert counted == {
        "prompt": length,
        "forks": MAX_CHOICES - 1,
        "generated": MAX_CHOICES * OUTPUT,
        "computed": length + MAX_CHOICES * (OUTPUT - 1),
    }
    every = [choice["token_ids"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(MAX_CHOICES))
    assert all(len(ids) == OUTPUT for ids in every)
    assert len({tuple(ids) for ids in every}) > MAX_CHOICES // 2
    # A draw depends on the seed, the choice and the position, not on how many choices there are.
    assert ids_of(server) == every[:1]
    assert ids_of(server, n=5) == every[:5]
    joined = Joined(stream_of(server, COMPLETIONS, {**BODY, "n": MAX_CHOICES}))
    assert [joined.token_ids[index] for index in range(MAX_CHOICES)] == every
    assert ids_of(server, temperature=0, n=MAX_CHOICES) == ids_of(server, temperature=0) * MAX_CHOICES


def test_one_more_is_refused(server: Any) -> None:
    bodies = {COMPLETIONS: BODY, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
    for path, body in bodies.items():
        status, error = refusal(server, path, {**body, "n": MAX_CHOICES + 1})
        assert (status, error["param"]) == (400, "n")
        assert str(MAX_CHOICES) in error["message"]
