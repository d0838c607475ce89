"""Penalties, biases and allowed ids through the whole server."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest

VOCAB_SIZE = 49152
PROMPT = "The sea, the sea, the sea. The"
CHAT = [{"role": "user", "content": "Say the word sea ten times."}]
NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
}


def complete(demo: Any, **fields: Any) -> list[int]:
    """Ids of a greedy completion, unless ``fields`` say otherwise."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    ids: list[int] = demo.post("/v1/completions", {**body, **fields})["choices"][0]["token_ids"]
    return ids


def test_neutral_values_change_nothing(demo: Any) -> None:
    assert complete(demo, **NEUTRAL) == complete(demo)
    drawn = {"temperature": 0.9, "seed": 5}
    assert complete(demo, **NEUTRAL, **drawn) == complete(demo, **drawn)


def test_a_bias_forces_a_token_and_forbids_one(demo: Any) -> None:
    forced = VOCAB_SIZE - 1
    assert complete(demo, logit_bias={str(forced): 100}, max_tokens=4) == [forced] * 4
    first = complete(demo, max_tokens=1)[0]
    assert first not in complete(demo, logit_bias={str(first): -100})


def test_only_allowed_ids_come(demo: Any) -> None:
    allowed = [500, 6000, VOCAB_SIZE - 1]
    drawn = complete(demo, allowed_token_ids=allowed, temperature=20, seed=1)
    assert set(drawn) == set(allowed)
    assert set(complete(demo, allowed_token_ids=allowed)) <= set(allowed)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}], ids=str
)
def test_penalties_make_a_text_repeat_less(demo: Any, penalty: dict[str, float]) -> None:
    plain, penalised = complete(demo), complete(demo, **penalty)
    assert len(set(penalised)) > len(set(plain))
    assert complete(demo, **penalty) == penalised, "the second time the prompt comes from the prefix cache"


def test_chat_takes_them_too(demo: Any) -> None:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 3, "return_token_ids": True, "frequency_penalty": 0.1}
    answer = demo.post("/v1/chat/completions", {**body, "logit_bias": {"6000": 100}, "repetition_penalty": 1.01})
    assert answer["choices"][0]["token_ids"] == [6000] * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(VOCAB_SIZE): 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"5": 1e9}},
        {"allowed_token_ids": [VOCAB_SIZE]},
        {"allowed_token_ids": []},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": "1"},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_and_the_next_request_served(demo: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        complete(demo, **fields)
    error = json.load(caught.value)["error"]
    assert (caught.value.code, error["param"]) == (400, next(iter(fields)))
    assert len(complete(demo, max_tokens=1)) == 1
