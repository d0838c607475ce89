"""What ``LLM`` and ``SamplingParams`` take and refuse, before anything is started."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import structlog

from headrace import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    InvalidRequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from headrace.beam_search import beam_search_output
from headrace.offline.keywords import settings_of
from headrace.offline.metrics import Counter, Gauge, Histogram, to_metrics
from headrace.offline.prompts import chat_prompts, params_list, priorities_list, read_prompts, text_spec, token_spec
from shared.errors import StartupError
from shared.logging import own_logger
from shared.messages import ModelCard
from shared.metrics import Registry

CARD = ModelCard("m", "d", vocab_size=100, max_model_len=32)


# -- SamplingParams --------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens, params.stop) == (1, 1.0, 1.0, 16, [])
    wire = params.to_shared()
    assert (wire.n, wire.temperature, wire.max_tokens, wire.seed, wire.logprobs) == (1, 1.0, 16, None, None)


def test_fields_arrive() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, top_k=-1, seed=7, stop="x", stop_token_ids=[3], logit_bias={4: 200.0, "5": -1}, top_p=0.9,
        allowed_token_ids=[1, 2], bad_words=["no"], logprobs=3, prompt_logprobs=0, truncate_prompt_tokens=5, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, max_tokens=None, ignore_eos=True,
        include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=1,
    )  # fmt: skip
    wire = params.to_shared(100)
    assert (wire.stop, wire.stop_token_ids, wire.bad_words) == (["x"], [3], ["no"])
    assert wire.logit_bias == [(4, 100.0), (5, -1.0)]
    assert (wire.logprobs, wire.prompt_logprobs, wire.truncate_prompt_tokens, wire.max_tokens) == (3, 0, 5, None)
    assert (wire.n, wire.seed, wire.top_k, wire.min_tokens, wire.ignore_eos) == (2, 7, -1, 1, True)
    assert (wire.include_stop_str_in_output, wire.skip_special_tokens) == (True, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2)],
        *[("min_p", 1.5), ("n", 0), ("n", 129), ("max_tokens", -1), ("max_tokens", 0), ("min_tokens", 17)],
        *[("stop", [""]), ("stop", [1]), ("stop", {"a": 1}), ("stop_token_ids", [-1]), ("stop_token_ids", "12")],
        *[("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", 21), ("truncate_prompt_tokens", 0)],
        *[("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {1: "x"}), ("logit_bias", {1: float("nan")})],
        *[("allowed_token_ids", []), ("bad_words", [" "]), ("repetition_penalty", 0.0), ("presence_penalty", 3)],
        *[("seed", 2**64), ("seed", 1.5), ("best_of", 0), ("best_of", 200), ("ignore_eos", 1), ("output_kind", 1)],
        *[("use_beam_search", True), ("structured_outputs", {"json": {}}), ("logits_processors", [len])],
        *[("spaces_between_special_tokens", False), ("extra_args", {"a": 1}), ("length_penalty", 2.0)],
    ],
)
def test_bad_value_is_a_value_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.param == field


def test_ids_are_checked_once_the_vocabulary_is_known() -> None:
    params = SamplingParams(stop_token_ids=[100])
    with pytest.raises(ValueError, match=r"stop_token_ids\[0\] = 100"):
        params.to_shared(100)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_scoring_alone_needs_prompt_logprobs() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).to_shared().max_tokens == 0


def test_best_of_makes_more_choices_and_scores_them() -> None:
    wire = SamplingParams(n=2, best_of=5).to_shared()
    assert (wire.n, wire.logprobs) == (5, 0)
    assert SamplingParams(n=2, best_of=2).to_shared().logprobs is None
    with pytest.raises(ValueError, match="best_of"):
        SamplingParams(n=3, best_of=2)


def test_clone_is_independent() -> None:
    params = SamplingParams(stop=["a"], seed=-1)
    copied = params.clone()
    copied.stop.append("b")  # type: ignore[union-attr]
    copied.max_tokens = 5
    assert (params.stop, params.max_tokens, params.seed) == (["a"], 16, None)
    assert "max_tokens=5" in repr(copied)


def test_from_optional_takes_none_for_defaults() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None)
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.5, None)


# -- beam search -----------------------------------------------------------------------------------------------------


def test_beam_search_is_called_as_in_vllm() -> None:
    parameters = list(inspect.signature(LLM.beam_search).parameters.values())[1:]
    assert [(each.name, each.default) for each in parameters] == [
        ("prompts", inspect.Parameter.empty),
        ("params", inspect.Parameter.empty),
        ("lora_request", None),
        ("use_tqdm", False),
        ("concurrency_limit", None),
    ]
    names = ["beam_width", "max_tokens", "ignore_eos", "temperature", "length_penalty", "include_stop_str_in_output"]
    assert [field.name for field in dataclasses.fields(BeamSearchParams)] == [*names, "early_stopping"]
    params = BeamSearchParams(3, 5)
    assert (params.ignore_eos, params.temperature, params.length_penalty, params.early_stopping) == (False, 0, 1, False)


def test_beam_search_fields_arrive() -> None:
    params = BeamSearchParams(4, 9, True, 0.0, 0.5, False, "never")
    wire = params.to_shared(params.sampling_params(), 100)
    assert (wire.beam_width, wire.n, wire.max_tokens, wire.ignore_eos) == (4, 4, 9, True)
    assert (wire.temperature, wire.length_penalty, wire.early_stopping, wire.logprobs) == (0.0, 0.5, "never", 8)
    assert BeamSearchParams(16, 9).sampling_params().logprobs == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("beam_width", 17), ("beam_width", 2.0), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "9")],
        *[("temperature", 0.5), ("temperature", -1.0), ("length_penalty", 11.0), ("length_penalty", float("nan"))],
        *[("early_stopping", "soon"), ("early_stopping", None), ("ignore_eos", 1), ("beam_width", 0)],
    ],
)
def test_bad_beam_search_value_is_named(field: str, value: Any) -> None:
    params = BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | {field: value}))
    with pytest.raises(InvalidRequest, match=field) as caught:
        params.to_shared(params.sampling_params(), 100)
    assert caught.value.param == field


def test_beam_search_output_ends_before_the_end_of_sequence() -> None:
    choices = [
        CompletionOutput(0, "", [7, 8, 2], -1.5, [{}, {}, {}], "stop", None),
        CompletionOutput(1, "", [7, 9, 9], -2.5, [{}, {}, {}], "length", None),
    ]
    output = RequestOutput("r", None, [1, 5], None, choices, finished=True)
    for kept, tokens in ((False, [1, 5, 7, 8]), (True, [1, 5, 7, 8, 2])):
        found = beam_search_output(output, BeamSearchParams(2, 3, include_stop_str_in_output=kept)).sequences
        assert [each.tokens for each in found] == [tokens, [1, 5, 7, 9, 9]]
        assert [(each.cum_logprob, len(each.logprobs), each.finish_reason) for each in found] == [
            (-1.5, 3, "stop"),
            (-2.5, 3, "length"),
        ]


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [[1, 2]]),
        (np.array([1, 2]), [None], [[1, 2]]),
        ([np.int64(3)], [None], [[3]]),
        ([[1], [2, 3]], [None, None], [[1], [2, 3]]),
        ({"prompt": "a"}, ["a"], [None]),
        ({"prompt_token_ids": (1, 2)}, [None], [[1, 2]]),
        ([{"prompt": "a", "prompt_token_ids": [9]}, "b", [4]], ["a", "b", None], [[9], None, [4]]),
        ({"prompt": "a", "multi_modal_data": None, "cache_salt": "s"}, ["a"], [None]),
        ([], [], []),
    ],
)
def test_forms_of_prompts(given: Any, texts: list[Any], ids: list[Any]) -> None:
    found = read_prompts(given)
    assert [prompt.text for prompt in found] == texts
    assert [None if prompt.ids is None else prompt.ids.tolist() for prompt in found] == ids


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (5, "prompts"),
        (None, "prompts"),
        ([1, "a"], "prompt"),
        (["a", 1], r"prompts\[1\]"),
        (["a", []], r"prompts\[1\] is empty"),
        ([[1, -1]], r"prompts\[0\]\[1\] = -1"),
        ([[1, 2**31]], r"prompts\[0\]\[1\]"),
        ([[1, 1.5]], r"prompts\[0\]"),
        ([[1, [2]]], r"prompts\[0\]"),
        ({"prompt": 1}, "prompt"),
        ({"text": "a"}, "text"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({}, "neither prompt nor prompt_token_ids"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_prompt_is_named(given: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        read_prompts(given)


def test_one_conversation_or_many() -> None:
    one = [{"role": "user", "content": "hi"}]
    assert len(chat_prompts(one)) == 1
    found = chat_prompts([one, one], chat_template_kwargs={"enable_thinking": False}, tools=[{"type": "function"}])
    assert [prompt.place for prompt in found] == ["messages[0]", "messages[1]"]
    assert found[0].chat is not None
    assert b"enable_thinking" in found[0].chat
    assert b"function" in found[0].chat


@pytest.mark.parametrize("messages", ["hi", [], [["hi"]], [{"content": "x"}], [[{"role": 1}]], [[]]])
def test_bad_conversation_is_named(messages: Any) -> None:
    if messages == []:
        assert chat_prompts(messages) == []
        return
    with pytest.raises(ValueError, match="messages"):
        chat_prompts(messages)


def test_chat_options_exclude_each_other() -> None:
    message = {"role": "user", "content": "x"}
    with pytest.raises(ValueError, match="continue_final_message"):
        chat_prompts([message], continue_final_message=True)
    with pytest.raises(ValueError, match="must not contain messages"):
        chat_prompts([message], chat_template_kwargs={"messages": []})


def test_one_params_for_each_prompt() -> None:
    first, second = SamplingParams(n=2), SamplingParams(n=3)
    assert params_list(None, 2, first) == [first, first]
    assert params_list(second, 2, first) == [second, second]
    assert params_list([first, second], 2, first) == [first, second]
    for wrong in ([first], [first, 1], {"n": 1}):
        with pytest.raises(ValueError, match="sampling_params"):
            params_list(wrong, 2, first)
    with pytest.raises(ValueError, match="priorit"):
        priorities_list([1], 2)


def test_output_ends_with_the_context_and_prompt_must_fit() -> None:
    params = SamplingParams(max_tokens=1000, min_tokens=30).to_shared()
    spec = token_spec(read_prompts([1] * 20)[0], params, 0, CARD)
    assert (spec.params.max_tokens, spec.params.min_tokens) == (12, 12)
    with pytest.raises(ValueError, match=r"prompts\[1\] has 32 tokens; max_model_len is 32"):
        text_spec(read_prompts([[1], [1] * 32])[1], params, 0, CARD)
    with pytest.raises(ValueError, match=r"prompt\[1\] = 100"):
        text_spec(read_prompts([1, 100])[0], params, 0, CARD)
    assert text_spec(read_prompts("a")[0], params, 0, CARD).clamp_max_tokens


def test_prompt_ids_are_truncated_from_the_left() -> None:
    def kept(**fields: Any) -> list[int]:
        prompt = read_prompts(list(range(40)))[0]
        token_spec(prompt, SamplingParams(**fields).to_shared(), 0, CARD)
        assert prompt.ids is not None
        ids: list[int] = prompt.ids.tolist()
        return ids

    assert kept(truncate_prompt_tokens=3) == [37, 38, 39]
    assert kept(truncate_prompt_tokens=-1, max_tokens=2) == list(range(10, 40))
    assert kept(truncate_prompt_tokens=-1, max_tokens=None) == list(range(9, 40))


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"bad_words": ["x"]}])
def test_what_needs_a_tokenizer_is_refused_without_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        token_spec(read_prompts([1])[0], SamplingParams(**fields).to_shared(), 0, CARD)
    with pytest.raises(ValueError, match="prompt must be token ids"):
        token_spec(read_prompts("a")[0], SamplingParams().to_shared(), 0, CARD)


# -- keywords --------------------------------------------------------------------------------------------------------


def test_keywords_become_settings() -> None:
    settings = settings_of(
        {
            "model": "x",
            "dtype": "torch.bfloat16",
            "max_model_len": 128,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 4096,
            "tensor_parallel_size": 1,
            "data_parallel_size": 2,
            "trust_remote_code": False,
            "swap_space": 4,
            "kv_offloading_size": 0.5,
            "preemption_mode": "swap",
            "disable_log_stats": True,
            "served_model_name": "y",
            "override_generation_config": {"top_p": 0.5},
            "quantization": None,
            "revision": None,
        }
    )
    assert (settings.model, settings.dtype, settings.max_model_len) == ("x", "bfloat16", 128)
    assert (settings.enable_prefix_caching, settings.kv_cache_bytes, settings.served_model_name) == (False, 4096, ["y"])
    assert settings.data_parallel_size == 2
    assert (settings.swap_space, settings.kv_offloading_size, settings.preemption_mode) == (4.0, 0.5, "swap")
    assert (settings.log_level, settings.override_generation_config) == ("warning", '{"top_p": 0.5}')


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"tensor_paralel_size": 5}, "tensor_parallel_size"),
        ({"zzz": 5}, "'zzz'$"),
    ],
)
def test_unknown_keyword_is_a_type_error_with_the_nearest(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        LLM("demo", **keywords)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *[("tensor_parallel_size", 2), ("trust_remote_code", True), ("swap_space", -1.0), ("quantization", "awq")],
        *[("dtype", "int3"), ("max_model_len", 0), ("max_num_seqs", "8"), ("gpu_memory_utilization", 1.5)],
        *[
            ("enforce_eager", 1),
            ("port", 1),
            ("api_key", ["x"]),
            ("listen", "ipc:///x"),
            ("tokenizers", 2),
            ("data_parallel_size", 0),
        ],
        *[("kv_cache_dtype", "fp8_e5m2"), ("cpu_offload_gb", 1), ("max_logprobs", 50)],
        ("speculative_config", {"a": 1}),
    ],
)
def test_keyword_that_is_not_supported_is_named(keyword: str, value: Any) -> None:
    with pytest.raises(ValueError, match=keyword):
        LLM("demo", **{keyword: value})


def test_model_that_is_not_there_is_named() -> None:
    with pytest.raises(StartupError, match="/no/such/model"):
        LLM("/no/such/model")


# -- the rest --------------------------------------------------------------------------------------------------------


def test_samples_become_metrics() -> None:
    registry = Registry()
    registry.counter("vllm:a").inc(3)
    registry.gauge("vllm:b").set(0.5)
    registry.histogram("vllm:c", (1.0, 2.0)).observe(1.5)
    counter, gauge, histogram = to_metrics(registry.samples(), {"engine": "e"})
    assert counter == Counter("vllm:a", {"engine": "e"}, 3)
    assert gauge == Gauge("vllm:b", {"engine": "e"}, 0.5)
    assert histogram == Histogram("vllm:c", {"engine": "e"}, 1, 1.5, {"1.0": 0, "2.0": 1, "+Inf": 1})


def test_import_is_light() -> None:
    code = (
        "import sys, headrace; before = set(sys.modules); "
        "assert not {'headrace.llm', 'numpy', 'zmq'} & before; "
        "from headrace import LLM, SamplingParams; "
        "assert not {'torch', 'transformers', 'aiohttp', 'tokenizers', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_log_leaves_the_set_up_of_the_program_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    log = own_logger("llm", "warning")
    log.info("quiet")
    log.warning("loud")
    assert structlog.get_config() == before
    shown = capsys.readouterr()
    assert (shown.out, "loud" in shown.err, "quiet" in shown.err) == ("", True, False)


def test_output_kinds_are_those_of_vllm() -> None:
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
