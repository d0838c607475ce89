"""Kinds of requests that break other servers: lengths, ids, choices, seeds, edges of sampling, forbidden words."""

from __future__ import annotations

import concurrent.futures
import json
import time
from typing import Any

import pytest

from tests.integration.streams import CHAT, COMPLETIONS, both, raw_post, refusal
from tests.tiny_models import VOCABULARY

CONTEXT = 128
PADDED = 400
"""Width of the logits: the last ids have no token."""
DEFAULTS = {"temperature": 0.7, "top_k": 0, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def server(start: Any, tiny_models: Any) -> Any:
    """A padded vocabulary, a generation_config of its own, a list of ends, few blocks."""
    folder = tiny_models.folder("llama", vocab_size=PADDED)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**DEFAULTS, "eos_token_id": [2, 3, 4]}))
    return start(str(folder), "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", "40")


def some_ids(length: int, salt: int = 0) -> list[int]:
    return [(37 * index + 11 * salt + 5) % 300 + 20 for index in range(length)]


def ids_of(server: Any, prompt: Any, **fields: Any) -> list[int]:
    """The ids of one completion: greedy, without the model's defaults, unless ``fields`` say otherwise."""
    body = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    ids: list[int] = server.post(COMPLETIONS, {"prompt": prompt, **body, **fields})["choices"][0]["token_ids"]
    return ids


# -- length limits -----------------------------------------------------------------------------------------------------


def test_length_limits(server: Any) -> None:
    chat = server.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
    assert chat["usage"]["total_tokens"] == CONTEXT
    plain = server.post(COMPLETIONS, {"prompt": some_ids(4), "ignore_eos": True})
    assert plain["usage"]["completion_tokens"] == 16
    last = server.post(COMPLETIONS, {"prompt": some_ids(CONTEXT - 1), "max_tokens": 1})
    assert last["usage"]["completion_tokens"] == 1
    for length, max_tokens, param in (
        (2, 10_000, "max_tokens"),
        (CONTEXT + 1, 1, "prompt"),
        (CONTEXT, 1, "prompt"),
        (CONTEXT - 1, 2, "max_tokens"),
    ):
        status, error = refusal(server, COMPLETIONS, {"prompt": some_ids(length), "max_tokens": max_tokens})
        assert (status, error["param"]) == (400, param)
        assert str(CONTEXT) in error["message"]
        assert str(length) in error["message"]


def test_a_prompt_that_is_too_long_can_be_truncated(server: Any) -> None:
    long = some_ids(CONTEXT + 50)
    cut = ids_of(server, long, truncate_prompt_tokens=20, max_tokens=8)
    assert cut == ids_of(server, long[-20:], max_tokens=8)
    answer = server.post(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 8})
    assert answer["usage"]["prompt_tokens"] <= CONTEXT - 8
    assert server.post(COMPLETIONS, {"prompt": [5, 6], "truncate_prompt_tokens": 20})["usage"]["prompt_tokens"] == 2
    for wrong in (0, -2, "1", CONTEXT + 1):
        status, error = refusal(server, COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": wrong})
        assert (status, error["param"]) == (400, "truncate_prompt_tokens")


# -- ids out of range, empty prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"191222": -100, "99999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"allowed_token_ids": [PADDED]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"stop_token_ids": [5279552648203111001]}, "stop_token_ids"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [PADDED]}, "prompt"),
        ({"prompt": [5279552648203111001]}, "prompt"),
        ({"prompt": [[1], [-5]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["fine", ""]}, "prompt"),
    ],
    ids=str,
)
def test_ids_out_of_range_and_empty_prompts(server: Any, fields: dict[str, Any], param: str) -> None:
    status, error = refusal(server, COMPLETIONS, {"prompt": "x", **fields})
    assert (status, error["param"]) == (400, param)
    assert len(ids_of(server, "next", max_tokens=1)) == 1


def test_the_bad_element_of_a_batch_is_named(server: Any) -> None:
    _, error = refusal(server, COMPLETIONS, {"prompt": [[5], [6], [7, PADDED]]})
    assert "prompt[2]" in error["message"]


def test_an_empty_prompt_is_the_bos_alone_where_the_model_has_one(start: Any, tiny_models: Any, tmp_path: Any) -> None:
    import shutil

    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "with_bos"
    shutil.copytree(tiny_models.folder("llama"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    other = start(str(folder), "--kv-cache-bytes", "4M")
    for prompt in ("", [""]):
        answer = other.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 2)
    echoed = other.post(COMPLETIONS, {"prompt": "mill", "max_tokens": 0, "echo": True, "logprobs": 0})
    logprobs = echoed["choices"][0]["logprobs"]
    assert echoed["choices"][0]["text"] == "mill"
    assert len(logprobs["tokens"]) == echoed["usage"]["prompt_tokens"]
    assert "".join(logprobs["tokens"]) == "mill", "the BOS has an entry, but no text"


# -- outputs keyed by choice and id ------------------------------------------------------------------------------------


def test_outputs_are_keyed_by_choice(server: Any) -> None:
    body = {"prompt": some_ids(20), "n": 4, "seed": 1, "temperature": 1.0, "max_tokens": 32, "ignore_eos": True}
    whole, _ = both(server, COMPLETIONS, body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) > 1
    assert (whole["usage"]["completion_tokens"], whole["usage"]["prompt_tokens"]) == (128, 20)


def test_the_best_of_several_choices(server: Any) -> None:
    body = {"prompt": some_ids(20), "seed": 1, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    every = server.post(COMPLETIONS, {**body, "n": 4})["choices"]
    best = server.post(COMPLETIONS, {**body, "n": 2, "best_of": 4})
    mean = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 8 for choice in every}
    ranked = sorted(every, key=lambda choice: -mean[choice["text"]])
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == 32
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        status, error = refusal(server, COMPLETIONS, {**body, **fields})
        assert (status, error["param"]) == (400, "best_of")


def test_two_requests_of_one_id(server: Any) -> None:
    """Both are answered with their own text, at once and one after the other."""

    def ask(salt: int) -> list[int]:
        body = {"prompt": some_ids(12, salt), "temperature": 0, "repetition_penalty": 1, "max_tokens": 24}
        body |= {"ignore_eos": True, "return_token_ids": True}
        _, headers, answer = raw_post(server, COMPLETIONS, json.dumps(body), {"X-Request-Id": "the-same"})
        assert headers["X-Request-Id"] == "the-same"
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    alone = [ids_of(server, some_ids(12, salt), max_tokens=24) for salt in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, range(3))) == alone
    assert [ask(salt) for salt in range(3)] == alone
    server.wait_idle(60)


# -- seeds and neighbours ----------------------------------------------------------------------------------------------


def test_a_seed_and_its_neighbours(server: Any) -> None:
    """A seeded draw is the same alone, beside any neighbours, and preempted; another seed or none gives another."""
    seeded = {"seed": 42, "temperature": 0.8, "max_tokens": 40}
    prompt = some_ids(17)
    alone = ids_of(server, prompt, **seeded)
    assert [ids_of(server, prompt, **seeded) for _ in range(3)] == [alone] * 3
    neighbours: list[dict[str, Any]] = [
        {"seed": index if index % 2 else None, "temperature": 0.9, "max_tokens": 60} for index in range(30)
    ]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        others = [pool.submit(ids_of, server, some_ids(25, 3 + i), **n) for i, n in enumerate(neighbours)]
        time.sleep(0.05)
        ours = [pool.submit(ids_of, server, prompt, **seeded) for _ in range(2)]
        assert [future.result() for future in ours] == [alone] * 2
        assert all(len(future.result()) == 60 for future in others)
    assert server.gauge("vllm:num_preemptions_total") > 0, "40 blocks are too many: nothing was preempted"
    assert ids_of(server, prompt, **{**seeded, "seed": 43}) != alone
    assert len({tuple(ids_of(server, prompt, **{**seeded, "seed": None})) for _ in range(3)}) == 3


# -- edges of sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": value} for value in (0, 1e-6, 1e-5, 1e-4)),
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1},
        {"temperature": 1.0, "top_p": 1e-8},
        {"temperature": 0.01, "top_p": 1e-3},
    ],
    ids=str,
)
def test_edges_of_sampling_that_are_greedy(server: Any, fields: dict[str, Any]) -> None:
    assert ids_of(server, some_ids(9), **fields) == ids_of(server, some_ids(9))


def test_edges_of_sampling_that_are_off(server: Any) -> None:
    drawn = {"temperature": 1.5, "seed": 9}
    plain = ids_of(server, some_ids(9), **drawn)
    for top_k in (-1, 0, PADDED, PADDED + 1):
        assert ids_of(server, some_ids(9), top_k=top_k, **drawn) == plain
    assert ids_of(server, some_ids(9), top_p=1, min_p=0, **drawn) == plain


@pytest.mark.parametrize(
    "field",
    [
        '"temperature": -1',
        '"temperature": NaN',
        '"temperature": "hot"',
        '"top_p": 1.1',
        '"top_p": 0',
        '"top_p": 1e999',
        '"top_k": 1.5',
        '"min_p": 2',
        '"min_p": -0.1',
        '"repetition_penalty": 0',
    ],
)
def test_edges_of_sampling_that_are_refused(server: Any, field: str) -> None:
    status, _, answer = raw_post(server, COMPLETIONS, f'{{"prompt": "x", {field}}}')
    assert status == 400
    assert answer["error"]["param"] in (field.split('"')[1], None)


def test_a_models_own_defaults_fill_in_what_is_left_out(server: Any) -> None:
    base = {"prompt": some_ids(9), "max_tokens": 16, "ignore_eos": True, "return_token_ids": True, "seed": 3}

    def ids(**fields: Any) -> list[int]:
        found: list[int] = server.post(COMPLETIONS, {**base, **fields})["choices"][0]["token_ids"]
        return found

    assert ids() == ids(**DEFAULTS)
    assert ids(temperature=None) == ids(**DEFAULTS)
    assert ids(temperature=0) == ids_of(server, some_ids(9), repetition_penalty=1.1)
    assert ids(temperature=1.0, repetition_penalty=1.0) != ids()
    log = server.log.read_text()
    assert "generation_config" in log
    assert "repetition_penalty" in log


def test_a_models_own_defaults_can_be_switched_off(start: Any, server: Any, tiny_models: Any) -> None:
    folder = tiny_models.folder("llama", vocab_size=PADDED)
    plain = start(str(folder), "--max-model-len", str(CONTEXT), "--generation-config", "vllm", "--kv-cache-bytes", "4M")
    body = {"prompt": some_ids(9), "max_tokens": 16, "ignore_eos": True, "return_token_ids": True, "seed": 3}
    found = plain.post(COMPLETIONS, body)["choices"][0]["token_ids"]
    assert found == ids_of(server, some_ids(9), seed=3, temperature=1.0)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_every_end_of_the_models_list_ends_the_text(server: Any) -> None:
    for end in (2, 3, 4):
        body = {"prompt": some_ids(9), "logit_bias": {str(end): 100}, "max_tokens": 8}
        choice = server.post(COMPLETIONS, body)["choices"][0]
        assert (choice["finish_reason"], choice["text"], choice["stop_reason"]) == ("stop", "", None)
        long = server.post(COMPLETIONS, {**body, "ignore_eos": True})
        assert (long["choices"][0]["finish_reason"], long["usage"]["completion_tokens"]) == ("length", 8)


# -- words that must not come ------------------------------------------------------------------------------------------


def test_words_that_must_not_come(demo: Any) -> None:
    """Neither bare nor after a space, in no choice; other words with the same pieces may."""
    words = [" exaggerated", "exaggerated"]
    space, bare = ([*demo.post("/tokenize", {"prompt": word})["tokens"]] for word in words)
    assert len(bare) > 1, "the bare form is one token"
    assert space != bare
    wanted = {str(token): 30 for token in {*space, *bare}}
    body = {"prompt": "The story is", "max_tokens": 24, "temperature": 1.0, "seed": 4, "n": 2, "logit_bias": wanted}
    free = demo.post(COMPLETIONS, {**body, "return_token_ids": True})["choices"]
    assert any("exaggerated" in choice["text"] for choice in free)
    banned = demo.post(COMPLETIONS, {**body, "bad_words": ["exaggerated"], "return_token_ids": True})["choices"]
    for choice in banned:
        assert "exaggerated" not in choice["text"]
        for sequence in (space, bare):
            windows = zip(*(choice["token_ids"][start:] for start in range(len(sequence))), strict=False)
            assert tuple(sequence) not in set(windows)
        assert set(choice["token_ids"]) & {*bare[:-1]}, "pieces of the word are allowed elsewhere"
    status, error = refusal(demo, COMPLETIONS, {"prompt": "x", "bad_words": [""]})
    assert (status, error["param"]) == (400, "bad_words")


# -- padded vocabulary -------------------------------------------------------------------------------------------------


def test_ids_without_a_token_are_never_sampled(server: Any) -> None:
    ids = ids_of(server, some_ids(9), temperature=20.0, n=1, seed=1, max_tokens=100)
    assert max(ids) < VOCABULARY
    assert max(ids) > VOCABULARY - 50, "the temperature is too low to reach the last ids"
    for fields in ({"logit_bias": {str(PADDED - 1): 100}}, {"allowed_token_ids": [PADDED - 1]}):
        status, error = refusal(server, COMPLETIONS, {"prompt": "x", **fields})
        assert (status, error["param"]) == (400, next(iter(fields)))


def test_ids_without_a_token_can_be_reported_and_decoded(server: Any) -> None:
    body = {"prompt": [5, PADDED - 1, 7], "max_tokens": 4, "logprobs": 20, "echo": True, "temperature": 0}
    choice = server.post(COMPLETIONS, body)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 7
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 20}
    content = server.post(CHAT, {**chat, "temperature": 2.0})["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    assert server.post("/detokenize", {"tokens": [PADDED - 1]})["prompt"] == ""
