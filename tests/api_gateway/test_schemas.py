"""What a request body may hold: every refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest

from api_gateway.fields import CHAT, COMPLETIONS
from api_gateway.limits import Limits
from api_gateway.schemas import (
    parse_body,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from shared.errors import ErrorCode, RequestError
from shared.messages import ModelCard

LIMITS = Limits(["demo", "other"], ModelCard("demo", "d", 1000, 2048), 2048)
HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "demo", "prompt": "Hi", **fields}).encode(), LIMITS)


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "demo", "messages": HELLO, **fields}).encode(), LIMITS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"min_tokens": 10**9}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"priority": 2**31}, "priority"),
        ({"request_id": "x" * 1_000_000}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"model": 5}, "model"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"repetition_penalty": [1]}, "repetition_penalty"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {" 5": 1}}, "logit_bias"),
        ({"logit_bias": {"٥": 1}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"5": -1e9}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"allowed_token_ids": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 1000]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 8193}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "temperature": 1}, "temperature"),
        ({"use_beam_search": True, "n": 2, "beam_width": 1}, "n"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"kv_transfer_params": {"tp_size": 5}}, "kv_transfer_params"),
    ],
)
def test_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(RequestError) as caught:
            parse(**fields)
        assert caught.value.param == param
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 1, "n": 2, "use_beam_search": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [5279552648203111001]}, "prompt"),
        ({"prompt": [[1], [-5]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"prompt": ["a"] * 100, "best_of": 11}, "prompt"),
        ({"prompt": [1] * 2048}, "prompt"),
        ({"prompt": [1] * 2047, "max_tokens": 2}, "max_tokens"),
        ({"prompt": [1] * 2048, "max_tokens": 0, "echo": True}, "prompt"),
        ({"prompt": [1] * 3000, "max_tokens": 2, "truncate_prompt_tokens": 2047}, "max_tokens"),
    ],
)
def test_refuses_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [None]}, "messages"),
        ({"messages": HELLO * 10_001}, "messages"),
        ({"messages": [*HELLO, {"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"tools": 1}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_refuses_chat(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"123",
        b'"s"',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": 1} x',
    ],
)
def test_refuses_what_is_not_a_json_object(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(body)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert len(caught.value.message) < 300


def test_deep_nesting_inside_messages_is_refused() -> None:
    body = b'{"messages":[{"role":"user","content":"x","extra":' + b"[" * 500 + b"]" * 500 + b"}]}"
    with pytest.raises(RequestError) as caught:
        parse_chat(body, LIMITS)
    assert caught.value.param == "messages"


def test_overflowing_numbers_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(b'{"prompt":"x","temperature":1e999}', LIMITS)
    assert caught.value.param in ("temperature", None)


def test_unknown_model_is_not_found() -> None:
    for parse in (completion, chat):
        with pytest.raises(RequestError) as caught:
            parse(model="nope")
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert caught.value.param == "model"


def test_null_is_the_same_as_leaving_out() -> None:
    names = {name: None for name in COMPLETIONS if name not in ("prompt", "seed")}
    assert completion(**names, seed=1) == completion(seed=1)
    names = {name: None for name in CHAT if name not in ("messages", "seed")}
    assert chat(**names, seed=1) == chat(seed=1)


def test_neutral_values_and_fields_without_effect_are_accepted() -> None:
    request = chat(
        frequency_penalty=0.0,
        presence_penalty=0,
        repetition_penalty=1.0,
        logit_bias={},
        logprobs=False,
        top_logprobs=0,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
    )
    assert request.ignored == []
    assert completion(suffix="", truncation_side="left", logprob_token_ids=[]).ignored == []


def test_defaults() -> None:
    request = completion()
    spec = request.specs[0]
    assert (spec.text, spec.ids, spec.chat, spec.add_special_tokens) == ("Hi", None, None, True)
    assert spec.params.max_tokens == 16
    assert spec.params.seed is not None
    spec = chat().specs[0]
    assert spec.params.max_tokens is None
    assert spec.add_special_tokens is False
    assert orjson.loads(spec.chat) == {
        "messages": HELLO,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }


def test_fields_reach_the_spec() -> None:
    request = chat(
        n=2,
        temperature=0,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        seed=-7,
        max_completion_tokens=9,
        min_tokens=3,
        ignore_eos=True,
        stop="END",
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-3,
        cache_salt="s",
        request_id="mine",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        surprise=1,
    )
    params = request.specs[0].params
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (2, 0.0, 0.5, 5, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens, params.ignore_eos) == (-7, 9, 3, True)
    assert (params.stop, params.stop_token_ids) == (["END"], [7])
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    assert (request.specs[0].priority, request.specs[0].cache_salt, request.request_id) == (-3, "s", "mine")
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)
    assert (request.shown.token_ids, request.ignored) == (True, ["surprise"])
    kwargs = orjson.loads(request.specs[0].chat)["chat_template_kwargs"]
    assert kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_prompt_forms() -> None:
    assert [s.text for s in completion(prompt=["a", "b"]).specs] == ["a", "b"]
    one = completion(prompt=[1, 2, 999]).specs
    assert [np.frombuffer(s.ids, np.int32).tolist() for s in one] == [[1, 2, 999]]
    two = completion(prompt=[[1], [2, 3]]).specs
    assert [np.frombuffer(s.ids, np.int32).tolist() for s in two] == [[1], [2, 3]]
    drawn = {s.params.seed for s in completion(prompt=["a", "b"]).specs}
    assert len(drawn) == 2
    assert {s.params.seed for s in completion(prompt=["a", "b"], seed=5).specs} == {5}
    assert completion(prompt=[1] * 2047, max_tokens=1).specs[0].params.max_tokens == 1


def test_bad_element_is_named_with_its_index() -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\]\[0\] = -5"):
        completion(prompt=[[1], [-5]])


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"prompt": [1] * 500_000},
        {"prompt": [[]] * 500_000},
        {"stop": ["x"] * 500_000},
        {"stop_token_ids": [1] * 500_000},
        {"logit_bias": {str(i): 1 for i in range(500_000)}},
        {"allowed_token_ids": [1] * 500_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_sizes_are_refused_before_any_work(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        completion(**fields)


def test_content_parts_and_tool_calls_pass() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    assert orjson.loads(chat(messages=messages).specs[0].chat)["messages"] == messages


def test_tokenize_and_detokenize() -> None:
    def tokenize(**fields: Any) -> Any:
        return parse_tokenize(orjson.dumps(fields), LIMITS)

    asked = tokenize(prompt="Hi", return_token_strs=True)
    assert (asked.spec.text, asked.spec.add_special_tokens, asked.want_strings) == ("Hi", True, True)
    asked = tokenize(messages=HELLO)
    assert asked.spec.add_special_tokens is False
    assert orjson.loads(asked.spec.chat)["messages"] == HELLO
    for bad in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 5}):
        with pytest.raises(RequestError) as caught:
            tokenize(**bad)
        assert caught.value.param == "prompt"
    assert parse_detokenize(b'{"tokens":[1,2]}', LIMITS).tokens.tolist() == [1, 2]
    for body in (b'{"tokens":[1000]}', b'{"tokens":[-1]}', b'{"tokens":"x"}', b"{}"):
        with pytest.raises(RequestError) as caught:
            parse_detokenize(body, LIMITS)
        assert caught.value.param == "tokens"
