"""``LLM`` on a tiny model: real processes, no HTTP. One instance for most tests."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runner_harness import reference_greedy, reference_model
from tiny_models import TinyModels
from waiting import wait_until

from headrace import LLM, RequestOutput, RequestOutputKind, SamplingParams
from headrace.offline.metrics import Counter, Histogram
from headrace.outputs import PositionLogprobs

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": 400}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, skip_special_tokens=False)
TEXT = "The water wheel turns"
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> pathlib.Path:
    return tiny_models.folder("qwen3")


@pytest.fixture(scope="module")
def llm(model: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(model), **OPTIONS) as made:
        yield made


def prompts_of_many_lengths(count: int) -> list[list[int]]:
    return [[5 + (7 * i + j) % 300 for j in range(1 + (11 * i) % 40)] for i in range(count)]


def choice_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def wait_idle(llm: LLM) -> None:
    """Until the engine holds nothing."""

    def held() -> float:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name in names)

    wait_until(lambda: held() == 0)


# -- whole answers ---------------------------------------------------------------------------------------------------


def test_greedy_ids_are_those_of_transformers_in_input_order(llm: LLM, model: pathlib.Path) -> None:
    prompts = prompts_of_many_lengths(12)
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    expected = [reference_greedy(model, prompt, 4 + i) for i, prompt in enumerate(prompts)]
    assert choice_ids(outputs) == expected
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_text_prompts_tell_their_ids_and_texts(llm: LLM) -> None:
    outputs = llm.generate([TEXT, {"prompt": "mill"}, {"prompt_token_ids": [40, 41]}], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [TEXT, "mill", None]
    ids = [llm.tokenize(TEXT), llm.tokenize("mill"), [40, 41]]
    assert [output.prompt_token_ids for output in outputs] == ids
    for output in outputs:
        choice = output.outputs[0]
        assert choice.text == llm.get_tokenizer().decode(choice.token_ids)
        assert (choice.index, choice.logprobs, choice.stop_reason) == (0, None, None)
    assert choice_ids(llm.generate(ids, GREEDY, use_tqdm=False)) == choice_ids(outputs)


def test_many_prompts_and_no_prompt(llm: LLM) -> None:
    prompts = prompts_of_many_lengths(1500)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert {len(ids) for ids in choice_ids(outputs)} == {2}
    assert llm.generate([], GREEDY) == []


def test_choices_of_one_prompt(llm: LLM) -> None:
    [output] = llm.generate(TEXT, SamplingParams(n=4, temperature=1.5, max_tokens=8, seed=3), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
    [again] = llm.generate(TEXT, SamplingParams(n=4, temperature=1.5, max_tokens=8, seed=3), use_tqdm=False)
    assert [choice.token_ids for choice in again.outputs] == [choice.token_ids for choice in output.outputs]


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "corn"}]
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    rendered = "<|im_start|>user\ncorn<|im_end|>\n<|im_start|>assistant\n"
    assert one[0].prompt == rendered
    assert llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == rendered
    assert choice_ids(two) == choice_ids(one) * 2
    [plain] = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert plain.prompt == "<|im_start|>user\ncorn<|im_end|>\n"


def test_stop_string_ends_the_text(llm: LLM) -> None:
    [free] = llm.generate(TEXT, GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    [output] = llm.generate(
        TEXT, SamplingParams(temperature=0, max_tokens=12, stop=stop, ignore_eos=True, skip_special_tokens=False)
    )
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    [bare] = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False))
    assert (bare.outputs[0].text, bare.outputs[0].token_ids) == ("", free.outputs[0].token_ids)


def test_output_ends_with_the_context(llm: LLM) -> None:
    limit = llm.card.max_model_len
    params = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    outputs = llm.generate([[7] * (limit - 5), {"prompt": TEXT}], params, use_tqdm=False)
    for output in outputs:
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == limit
        assert output.outputs[0].finish_reason == "length"


def test_defaults_of_the_model(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert params.to_shared(llm.card.vocab_size).max_tokens == 16
    [output] = llm.generate(TEXT, use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_times_and_cached_tokens(llm: LLM) -> None:
    prompt = list(range(50, 90))
    llm.generate(prompt, GREEDY, use_tqdm=False)
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32
    times = output.metrics
    assert times is not None
    assert times.first_token_time is not None
    assert times.last_token_time is not None
    assert times.finished_time is not None
    assert times.arrival_time <= times.first_token_time <= times.last_token_time <= times.finished_time


def test_wrong_prompt_starts_nothing(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]\[0\] = 99999"):
        llm.generate([[1], [99999]], GREEDY)
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate([[1]], SamplingParams(stop_token_ids=[99999]))
    wait_idle(llm)


def test_prompt_that_turns_out_too_long_does_not_end_the_others(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*max_model_len") as caught:
        llm.generate([TEXT, "wheel " * 2000, "mill"], GREEDY, use_tqdm=False)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert outputs[1] is None
    assert [len(output.outputs[0].token_ids) for output in (outputs[0], outputs[2])] == [12, 12]


def test_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2], [3]], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "3/3" in shown
    assert "est. speed input" in shown
    llm.generate([[1]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_priorities_order_what_waits(llm: LLM) -> None:
    outputs = llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    assert [output.prompt_token_ids for output in outputs] == [[1], [2], [3]]


def test_several_threads_at_once(llm: LLM) -> None:
    expected = choice_ids(llm.generate(prompts_of_many_lengths(6), GREEDY, use_tqdm=False))
    found: dict[int, list[int]] = {}

    def work(index: int, prompt: list[int]) -> None:
        found[index] = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=item) for item in enumerate(prompts_of_many_lengths(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(6)] == expected


def test_interrupted_generate_aborts_and_leaves_the_rest_usable(llm: LLM) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 2000, LONG, use_tqdm=False)
    wait_idle(llm)
    assert len(llm.generate(TEXT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_metrics_count(llm: LLM) -> None:
    def value(name: str) -> int:
        return sum(metric.value for metric in llm.get_metrics() if isinstance(metric, Counter) and metric.name == name)

    before = value("vllm:generation_tokens")
    llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert value("vllm:generation_tokens") == before + 24
    histograms = {metric.name: metric for metric in llm.get_metrics() if isinstance(metric, Histogram)}
    assert histograms["vllm:e2e_request_latency_seconds"].count >= 2


def test_end_of_sequence_is_among_the_ids_and_not_in_the_text(llm: LLM) -> None:
    [output] = llm.generate(TEXT, SamplingParams(temperature=0, logit_bias={2: 100}), use_tqdm=False)
    choice = output.outputs[0]
    assert (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) == ([2], "", "stop", None)


# -- log-probabilities -----------------------------------------------------------------------------------------------


def reference_logprobs(model: pathlib.Path, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocabulary] of transformers: row i predicts the token after i."""
    with torch.inference_mode():
        return torch.log_softmax(reference_model(model)(torch.tensor([ids])).logits[0].float(), -1)


def check_position(position: PositionLogprobs, token: int, expected: torch.Tensor, count: int) -> None:
    rank = int((expected > expected[token]).sum()) + 1
    assert next(iter(position)) == token
    assert position[token].rank == rank
    top = [int(each) for each in expected.topk(count).indices]
    assert list(position) == [token, *[each for each in top if each != token]]
    for each, found in position.items():
        assert found.logprob == pytest.approx(float(expected[each]), abs=1e-4)


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_those_of_transformers(llm: LLM, model: pathlib.Path, count: int) -> None:
    params = SamplingParams(
        n=2, temperature=0.9, seed=1, max_tokens=6, ignore_eos=True, logprobs=count, prompt_logprobs=count
    )
    outputs = llm.generate([TEXT, [30, 31, 32, 33]], params, use_tqdm=False)
    for output in outputs:
        prompt = output.prompt_token_ids
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for choice in output.outputs:
            expected = reference_logprobs(model, prompt + choice.token_ids)
            for index, position in enumerate(output.prompt_logprobs):
                if position is not None:
                    check_position(position, prompt[index], expected[index - 1], count)
            assert choice.logprobs is not None
            assert len(choice.logprobs) == 6
            for index, (token, position) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
                check_position(position, token, expected[len(prompt) + index - 1], count)
                assert position[token].decoded_token is not None
            assert choice.cumulative_logprob == pytest.approx(
                sum(position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True))
            )


def test_prompt_is_scored_without_any_output(llm: LLM) -> None:
    [output] = llm.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([], "")
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_best_of_returns_the_most_probable_choices(llm: LLM) -> None:
    params = {"temperature": 1.2, "seed": 5, "max_tokens": 5, "ignore_eos": True}
    [every] = llm.generate(TEXT, SamplingParams(n=6, logprobs=0, **params), use_tqdm=False)
    [best] = llm.generate(TEXT, SamplingParams(n=2, best_of=6, **params), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda choice: -(choice.cumulative_logprob or 0.0))
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ranked[:2]]
    assert [(choice.index, choice.logprobs, choice.cumulative_logprob) for choice in best.outputs] == [
        (0, None, None),
        (1, None, None),
    ]
    with pytest.raises(ValueError, match="best_of"):
        llm.stream(TEXT, SamplingParams(n=2, best_of=6, **params))


def test_logprobs_in_streams(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    [whole] = llm.generate(TEXT, params, use_tqdm=False)
    *_, last = llm.stream(TEXT, params)
    assert last.outputs[0].logprobs == whole.outputs[0].logprobs
    assert last.outputs[0].cumulative_logprob == whole.outputs[0].cumulative_logprob
    assert last.prompt_logprobs == whole.prompt_logprobs
    params.output_kind = RequestOutputKind.DELTA
    parts = [position for output in llm.stream(TEXT, params) for position in output.outputs[0].logprobs or []]
    assert parts == whole.outputs[0].logprobs


# -- streams ---------------------------------------------------------------------------------------------------------


def test_stream_grows_to_the_whole(llm: LLM) -> None:
    [whole] = llm.generate(TEXT, GREEDY, use_tqdm=False)
    text, last = "", None
    for output in llm.stream(TEXT, GREEDY):
        text += output.outputs[0].delta
        assert output.outputs[0].text == text
        last = output
    assert last is not None
    assert last.finished
    assert last.outputs == [dataclasses.replace(whole.outputs[0], delta=last.outputs[0].delta)]
    assert last.prompt_token_ids == whole.prompt_token_ids


def test_stream_of_deltas_and_of_the_end_only(llm: LLM) -> None:
    [whole] = llm.generate(TEXT, GREEDY, use_tqdm=False)
    params = GREEDY.clone()
    params.output_kind = RequestOutputKind.DELTA
    outputs = list(llm.stream(TEXT, params))
    ids = [token for output in outputs for token in output.outputs[0].token_ids]
    assert ids == whole.outputs[0].token_ids
    assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text
    params.output_kind = RequestOutputKind.FINAL_ONLY
    [only] = llm.stream(TEXT, params)
    assert only.finished
    assert only.outputs[0].token_ids == whole.outputs[0].token_ids


async def test_many_streams_in_one_event_loop(llm: LLM) -> None:
    prompts = prompts_of_many_lengths(20)
    expected = choice_ids(await asyncio.to_thread(llm.generate, prompts, GREEDY, use_tqdm=False))

    async def read(prompt: list[int]) -> list[int]:
        ids: list[int] = []
        async for output in llm.generate_async(prompt, GREEDY):
            ids = output.outputs[0].token_ids
        return ids

    assert await asyncio.gather(*map(read, prompts)) == expected
    one = llm.generate(prompts[3], GREEDY, use_tqdm=False)  # blocks this loop, but works within it
    assert choice_ids(one) == [expected[3]]


def test_streams_in_an_event_loop_of_uvloop(llm: LLM) -> None:
    import uvloop

    async def read() -> int:
        return len([output async for output in llm.chat_async([{"role": "user", "content": "corn"}], GREEDY)])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(read()) > 0


def test_closing_a_stream_aborts_the_request(llm: LLM) -> None:
    with llm.stream([1, 2, 3], LONG) as stream:
        next(stream)
    assert list(stream) == []
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    del stream
    gc.collect()
    wait_idle(llm)


async def test_cancelling_the_reader_aborts_the_request(llm: LLM) -> None:
    async def read() -> None:
        async for _ in llm.generate_async([1, 2, 3], LONG):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_idle, llm)


def test_abort_by_id_ends_the_stream_with_a_reason(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], LONG, request_id="mine")
    next(stream)
    with pytest.raises(ValueError, match="in use"):
        list(llm.stream([1], GREEDY, request_id="mine"))
    llm.abort("mine")
    last = list(stream)[-1]
    assert last.request_id == "mine"
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"


def test_error_of_a_stream_comes_where_it_is_read(llm: LLM) -> None:
    stream = llm.stream("wheel " * 2000, GREEDY)
    with pytest.raises(ValueError, match="max_model_len"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_one_prompt_for_a_stream(llm: LLM) -> None:
    with pytest.raises(ValueError, match="one prompt"):
        llm.stream([[1], [2]], GREEDY)


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["gpu_worker", "core_engine", "tokenizer_service"])
def test_process_killed_while_generating(llm: LLM, model: pathlib.Path, service: str) -> None:
    prompts = prompts_of_many_lengths(8)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    found: list[RequestOutput] = []
    caller = threading.Thread(target=lambda: found.extend(llm.generate(prompts, params, use_tqdm=False)))
    stream = llm.stream([9, 8, 7], params)
    next(stream)
    caller.start()
    time.sleep(0.1)
    pid = llm._session.pids()[service]
    os.kill(pid, signal.SIGKILL)
    caller.join(120)
    assert [output.prompt_token_ids for output in found] == prompts
    assert {len(ids) for ids in choice_ids(found)} == {150}
    assert len(list(stream)[-1].outputs[0].token_ids) == 150
    wait_until(lambda: llm._session.pids().get(service) not in (None, pid))
