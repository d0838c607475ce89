"""What becomes of sampling fields: parameters, the model's own defaults, and what the answer will show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_gateway.limits import Limits
from api_gateway.schemas import parse_chat, parse_completion
from shared.errors import RequestError
from shared.messages import ModelCard

CARD = ModelCard("demo", "d", 1000, 2048)
LIMITS = Limits(["demo", "other"], CARD, 2048)
HELLO = [{"role": "user", "content": "Hello"}]
DEFAULTS = [
    ("temperature", 0.7),
    ("top_p", 0.8),
    ("top_k", 20.0),
    ("min_p", 0.1),
    ("repetition_penalty", 1.1),
    ("max_tokens", 99.0),
    ("unheard_of", 1.0),
]
TUNED = Limits(["demo"], ModelCard("demo", "d", 1000, 2048, DEFAULTS), 2048)
CAPPED = Limits(["demo"], CARD, 2048, max_output_tokens=32)


def completion(limits: Limits = LIMITS, **fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "demo", "prompt": "Hi", **fields}).encode(), limits)


def chat(limits: Limits = LIMITS, **fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "demo", "messages": HELLO, **fields}).encode(), limits)


def params(request: Any) -> Any:
    return request.specs[0].params


# -- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 10], got 0.0"),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0"),
        ({"logit_bias": {"-1": 1}}, "logit_bias key '-1' is not a token id"),
        ({"logit_bias": {"1000": 1}}, "logit_bias key 1000 is not a token id in 0..999"),
        ({"logit_bias": {"5": -101}}, "logit_bias[5] must be in [-100, 100], got -101.0"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[5] must be a number, got 'x'"),
        ({"allowed_token_ids": [7, 1000]}, "allowed_token_ids[1] = 1000 is not a token id in 0..999"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty; leave it out to allow all"),
    ],
)
def test_refusals_say_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(RequestError) as caught:
            parse(**fields)
        assert caught.value.message == message


def test_bounds_of_penalties_biases_and_allowed_ids_are_accepted() -> None:
    for parse in (completion, chat):
        params = (
            parse(
                repetition_penalty=10,
                presence_penalty=-2,
                frequency_penalty=2,
                logit_bias={"0": -100, "999": 100.0},
                allowed_token_ids=[0, 999],
            )
            .specs[0]
            .params
        )
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (10.0, -2.0, 2.0)
        assert (params.logit_bias, params.allowed_token_ids) == ([(0, -100.0), (999, 100.0)], [0, 999])
    assert completion(repetition_penalty=1e-300).specs[0].params.repetition_penalty == 1e-300


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": value} for value in (0, 1e-6, 1e-5, 1e-4, 0.01, 100)),
        *({"top_k": value} for value in (-1, 0, 1, 1000, 1001)),
        *({"top_p": value} for value in (1e-8, 1)),
        *({"min_p": value} for value in (0, 1)),
        *({"prompt_logprobs": value} for value in (0, 20)),
        *({"truncate_prompt_tokens": value} for value in (-1, 1, 2048)),
        {"bad_words": ["x"] * 128},
    ],
)
def test_edges_of_ranges_are_accepted_as_they_are(fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    for parse in (completion, chat):
        assert getattr(params(parse(**fields)), name) == value


@pytest.mark.parametrize("value", ["nan", "Infinity", "1e999", '"1"', "true", "[]"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k", "logprobs"])
def test_what_is_no_number_is_refused(name: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(f'{{"prompt": "x", "{name}": {value}}}'.encode(), LIMITS)
    assert caught.value.param in (name, None)
    assert caught.value.code.status == 400


# -- the model's own defaults ----------------------------------------------------------------------------------------


def test_model_defaults_stand_for_fields_that_are_left_out() -> None:
    for parse in (completion, chat):
        for nulls in ({}, {name: None for name, _ in DEFAULTS}):
            made = params(parse(TUNED, **nulls))
            assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.7, 0.8, 20, 0.1)
            assert isinstance(made.top_k, int)
            assert made.repetition_penalty == 1.1


def test_a_requests_own_value_wins_over_the_models() -> None:
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 5}
    for parse in (completion, chat):
        made = params(parse(TUNED, **own))
        assert {name: getattr(made, name) for name in own} == own


def test_the_models_max_tokens_is_applied_where_the_room_is_known() -> None:
    for parse in (completion, chat):
        assert params(parse(TUNED)).max_tokens is None
        assert params(parse(TUNED, max_tokens=None)).max_tokens is None
        assert params(parse(TUNED, max_completion_tokens=7)).max_tokens == 7
    assert params(completion()).max_tokens == 16
    assert params(chat()).max_tokens is None


def test_no_defaults_without_a_card() -> None:
    assert params(completion(Limits(["demo"], None, None))).temperature == 1.0


# -- the cap on outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [33, 2047, 2048, 2**31 - 1])
def test_room_is_needed_for_a_capped_output_only(asked: int) -> None:
    """Whatever is asked for counts as the cap: beside ids, for ``truncate_prompt_tokens``, and for ``min_tokens``."""
    for name in ("max_tokens", "max_completion_tokens"):
        for fields in ({}, {"min_tokens": 33}, {"truncate_prompt_tokens": -1}):
            for parse in (completion, chat):
                made = params(parse(CAPPED, **{name: asked}, **fields))
                assert (made.max_tokens, made.min_tokens) == (32, 32 if "min_tokens" in fields else 0)
        completion(CAPPED, prompt=[5] * 2016, **{name: asked})
        with pytest.raises(RequestError) as caught:
            completion(CAPPED, prompt=[5] * 2017, **{name: asked})
        assert caught.value.message == "max_tokens 32 + prompt 2017 > max_model_len 2048"


def test_what_is_below_the_cap_or_left_out_stays() -> None:
    for parse in (completion, chat):
        assert params(parse(CAPPED, max_tokens=32)).max_tokens == 32
        assert params(parse(CAPPED, max_tokens=5, min_tokens=5)).min_tokens == 5
    assert params(completion(CAPPED)).max_tokens == 16
    assert params(completion(CAPPED, echo=True, max_tokens=0)).max_tokens == 0
    assert params(chat(CAPPED)).max_tokens is None
    assert params(chat(CAPPED, min_tokens=99)).min_tokens == 32


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": 2**31}, {"max_tokens": 50, "min_tokens": 51}])
def test_a_cap_makes_nothing_valid(fields: dict[str, Any]) -> None:
    for parse in (completion, chat):
        for limits in (LIMITS, CAPPED):
            with pytest.raises(RequestError) as caught:
                parse(limits, **fields)
            assert caught.value.param == list(fields)[-1]


# -- what is asked of tokens and prompts -----------------------------------------------------------------------------


def test_logprobs_reach_the_parameters() -> None:
    for top in (0, 20):
        assert (params(completion(logprobs=top)).logprobs, params(completion(logprobs=top)).prompt_logprobs) == (
            top,
            None,
        )
        made = params(chat(logprobs=True, top_logprobs=top))
        assert (made.logprobs, made.prompt_logprobs) == (top, None)
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=False, top_logprobs=0)).logprobs is None
    assert params(completion()).logprobs is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 5),
        ({"echo": True, "prompt_logprobs": 0}, 0),
        ({"logprobs": 3}, None),
        ({"logprobs": 3, "prompt_logprobs": 1}, 1),
    ],
)
def test_prompts_are_scored_for_echo_and_on_demand(fields: dict[str, Any], expected: int | None) -> None:
    request = completion(**fields)
    assert params(request).prompt_logprobs == expected
    assert request.specs[0].echo is fields.get("echo", False)
    assert (request.shown.logprobs, request.shown.prompt_logprobs) == (
        fields.get("logprobs"),
        fields.get("prompt_logprobs"),
    )


def test_best_of_generates_more_and_scores_them() -> None:
    request = completion(n=2, best_of=5)
    assert (request.n, request.generated, params(request).n, params(request).logprobs) == (2, 5, 5, 0)
    assert request.shown.logprobs is None
    assert params(completion(best_of=5, logprobs=2)).logprobs == 2
    request = completion(n=3, best_of=3, stream=True)
    assert (request.generated, params(request).logprobs) == (3, None)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_only_with_a_question_about_the_prompt(name: str) -> None:
    assert params(completion(**{name: 0}, echo=True)).max_tokens == 0
    for parse in (completion, chat):
        assert params(parse(**{name: 0}, prompt_logprobs=0)).max_tokens == 0
        with pytest.raises(RequestError) as caught:
            parse(**{name: 0})
        assert caught.value.param == name


def test_bad_words_and_truncation_reach_the_parameters() -> None:
    for parse in (completion, chat):
        made = params(parse(bad_words=["a", " b"], truncate_prompt_tokens=7))
        assert (made.bad_words, made.bad_words_token_ids, made.truncate_prompt_tokens) == (["a", " b"], [], 7)
    assert completion(bad_words_token_ids=[[1]]).ignored == ["bad_words_token_ids"]


def test_a_prompt_that_is_cut_to_fit_is_taken() -> None:
    for kept in (-1, 2047):
        request = completion(prompt=[1] * 3000, max_tokens=1, truncate_prompt_tokens=kept)
        assert len(request.specs[0].ids) == 4 * 3000


def test_what_is_shown() -> None:
    shown = completion(return_token_ids=True, return_tokens_as_token_ids=True, echo=True).shown
    assert (shown.token_ids, shown.tokens_as_ids, shown.echo, shown.prompt) == (True, True, True, True)
    shown = chat(prompt_logprobs=1).shown
    assert (shown.echo, shown.prompt) == (False, True)
    assert not completion(logprobs=5).shown.prompt


@pytest.mark.parametrize(
    ("fields", "width", "n"),
    [({"n": 3}, 3, 3), ({"n": 2, "best_of": 4}, 4, 2), ({"n": 2, "best_of": 4, "beam_width": 5}, 5, 2), ({}, 1, 1)],
)
def test_beam_search(fields: dict[str, Any], width: int, n: int) -> None:
    request = completion(use_beam_search=True, length_penalty=0.5, early_stopping="never", **fields)
    found = params(request)
    assert (found.beam_width, found.n, request.n, found.temperature, found.logprobs) == (width, n, n, 0.0, None)
    assert (found.length_penalty, found.early_stopping) == (0.5, "never")
