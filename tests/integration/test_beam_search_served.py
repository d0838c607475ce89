"""Beam searches on a small server, beside others: scores, chats, little memory, refusals, clients who leave."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import pathlib
import random
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runner_harness import beam_search, reference_model
from tiny_models import TinyModels

from tests.integration.streams import CHAT, COMPLETIONS, both, refusal, stream_of
from tests.integration.test_beam_search import OUTPUT, WIDTH, expected, prompt_of

NUM_BLOCKS, MAX_NUM_SEQS = 48, 8
SEARCH: dict[str, Any] = {
    "use_beam_search": True,
    "beam_width": WIDTH,
    "n": WIDTH,
    "max_tokens": OUTPUT,
    "return_token_ids": True,
}
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> pathlib.Path:
    return tiny_models.folder("llama")


@pytest.fixture(scope="module")
def server(serving: Any, model: pathlib.Path) -> Iterator[Any]:
    flags = {"--num-gpu-blocks-override": NUM_BLOCKS, "--max-num-seqs": MAX_NUM_SEQS, "--threads": 1}
    more = ["--dtype=float32", "--batch-invariant", "--scheduling-policy=priority"]
    with serving(str(model), *more, *(f"{name}={value}" for name, value in flags.items())) as begun:
        yield begun


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize("length_penalty", [0.5, 2.0])
def test_scores_are_those_of_transformers(server: Any, model: pathlib.Path, length_penalty: float) -> None:
    """Of each token, of the most probable ones beside it, and of the hypothesis; for fewer choices than beams, too."""
    prompt = prompt_of(33)
    body = {**SEARCH, "prompt": prompt, "length_penalty": length_penalty, "logprobs": 3}
    whole, _ = both(server, COMPLETIONS, body)
    reference = reference_model(model)
    found = beam_search(
        reference,
        prompt,
        WIDTH,
        OUTPUT,
        length_penalty=length_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = found.sequences_scores.tolist()
    for choice, score in zip(whole["choices"], scores, strict=True):
        ids, logprobs = choice["token_ids"], choice["logprobs"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        rows = logits.log_softmax(-1)
        assert logprobs["token_logprobs"] == pytest.approx(rows[range(len(ids)), ids].tolist(), abs=1e-4)
        for top, row in zip(logprobs["top_logprobs"], rows, strict=True):
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert sum(logprobs["token_logprobs"]) / len(ids) ** length_penalty == pytest.approx(score, abs=1e-4)
    for n in (1, 2):
        assert server.post(COMPLETIONS, {**body, "n": n})["choices"] == whole["choices"][:n]


def test_chats(server: Any, model: pathlib.Path) -> None:
    body = {**SEARCH, "messages": [{"role": "user", "content": "Which way does the water run?"}], "logprobs": True}
    whole, joined = both(server, CHAT, {**body, "n": 3, "top_logprobs": 2})
    prompt = server.post("/tokenize", {"messages": body["messages"]})["tokens"]
    assert ids_of(whole) == [joined.token_ids[index] for index in range(3)] == expected(model, prompt)[:3]
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert whole["usage"]["completion_tokens"] == sum(map(len, ids_of(whole)))
    chunks = stream_of(server, CHAT, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == sum(map(len, expected(model, prompt)))


def test_beside_others_in_little_memory(server: Any, model: pathlib.Path) -> None:
    """Searches and ordinary requests are preempted, and all have what they have alone."""
    plain = [{**PLAIN, "prompt": prompt_of(20 + i), "priority": i % 3} for i in range(8)]
    drawn = [{**each, "temperature": 0.9, "seed": i, "n": 2} for i, each in enumerate(plain)]
    lengths = range(30, 42)
    searches = [{**SEARCH, "prompt": prompt_of(length), "priority": length % 3} for length in lengths]
    alone = [ids_of(server.post(COMPLETIONS, body)) for body in (*plain, *drawn)]
    bodies = list(enumerate([*plain, *drawn, *searches]))
    random.Random(1).shuffle(bodies)
    searched = [expected(model, prompt_of(length)) for length in lengths]
    # Who runs beside whom is up to the machine: again, until somebody has lost its memory.
    for _ in range(6):
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = dict(pool.map(lambda item: (item[0], ids_of(server.post(COMPLETIONS, item[1]))), bodies))
        assert [answers[index] for index in range(len(bodies))] == [*alone, *searched]
        server.wait_idle(10)
        if server.gauge("vllm:num_preemptions_total") > 0:
            break
    else:
        pytest.fail(f"{NUM_BLOCKS} blocks are too many: nothing was preempted")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"beam_width": MAX_NUM_SEQS + 1}, "beam_width", "at the same time"),
        ({"beam_width": 17, "n": 1}, "beam_width", "17"),
        ({"beam_width": 2}, "n", "beam_width 2"),
        ({"beam_width": 8, "n": 8, "max_tokens": 400}, "beam_width", "8 beams after a prompt of 40 tokens may need"),
        ({"stop_token_ids": list(range(100, 130))}, "beam_width", "stop tokens are more than 32"),
        ({"temperature": 0.5}, "temperature", "0.5"),
        ({"use_beam_search": False}, "beam_width", "use_beam_search"),
    ],
)
def test_what_cannot_be_searched_is_refused(server: Any, fields: dict[str, Any], param: str, words: str) -> None:
    prompts = {COMPLETIONS: {"prompt": prompt_of(40)}, CHAT: {"messages": [{"role": "user", "content": "mill " * 9}]}}
    for path, prompt in prompts.items():
        status, error = refusal(server, path, {**SEARCH, **prompt, **fields})
        assert (status, error["param"]) == (400, param)
        if path == COMPLETIONS:
            assert words in error["message"]


def test_prompts_of_all_lengths_that_fit_are_searched(server: Any) -> None:
    """A beam is as long as the memory allows if no length is asked for, and what fits exactly is taken."""
    chat = {**SEARCH, "messages": [{"role": "user", "content": "x"}], "max_tokens": None, "ignore_eos": True, "n": 1}
    answer = server.post(CHAT, {**chat, "beam_width": 8, "early_stopping": True})
    num_tokens = answer["usage"]["total_tokens"]
    prompt_len = answer["usage"]["prompt_tokens"]
    shared = prompt_len // 16
    assert num_tokens == (shared + (NUM_BLOCKS - 1 - shared - 8) // 8) * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    body = {**SEARCH, "prompt": prompt_of(prompt_len), "ignore_eos": True, "n": 1, "beam_width": 8}
    fits = num_tokens - prompt_len
    assert server.post(COMPLETIONS, {**body, "max_tokens": fits})["usage"]["completion_tokens"] == fits
    assert refusal(server, COMPLETIONS, {**body, "max_tokens": fits + 1})[1]["param"] == "beam_width"


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_leaves_costs_nothing(server: Any, model: pathlib.Path, delay_s: float, waits: bool) -> None:
    """At whatever stage its search is, also in the queue."""
    long = {**SEARCH, "prompt": prompt_of(60), "max_tokens": 80, "ignore_eos": True, "stream": delay_s != 0.1}
    parts = urllib.parse.urlsplit(server.url)
    connections = []
    for _ in range(4 if waits else 1):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        connection.request("POST", COMPLETIONS, json.dumps(long), {"Content-Type": "application/json"})
        connections.append(connection)
    time.sleep(delay_s)
    for connection in connections:
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    server.wait_idle(10)
    assert ids_of(server.post(COMPLETIONS, {**SEARCH, "prompt": prompt_of(17)})) == expected(model, prompt_of(17))


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_whose_time_is_over(server: Any, model: pathlib.Path, stream: bool) -> None:
    body = {**SEARCH, "prompt": prompt_of(60), "max_tokens": 90, "ignore_eos": True, "timeout": 0.1, "stream": stream}
    if stream:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.url + COMPLETIONS, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: ")]
        assert [json.loads(event)["error"]["code"] for event in events if b"error" in event] == [408]
    else:
        assert refusal(server, COMPLETIONS, body)[0] == 408
    server.wait_idle(10)
    assert ids_of(server.post(COMPLETIONS, {**SEARCH, "prompt": prompt_of(17)})) == expected(model, prompt_of(17))
