"""Log-probabilities through the whole server, against transformers: of the output, of the prompt, and echoed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.streams import CHAT, COMPLETIONS, both, refusal
from tests.tiny_models import VOCABULARY

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33)
TEXT = "Your answer: Yes"


@pytest.fixture(scope="module")
def folder(tiny_models: Any) -> Any:
    return tiny_models.folder("llama")


@pytest.fixture(scope="module")
def server(start: Any, folder: Any) -> Any:
    """Blocks of 16, and prompts computed in chunks of eight tokens."""
    return start(str(folder), "--max-num-batched-tokens", "8", "--kv-cache-bytes", "4M")


@pytest.fixture(scope="module")
def tokenizer(folder: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reference(folder: Any) -> Any:
    """``reference(ids)``: [len(ids) - 1, vocabulary] log-probabilities of each next token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def scores(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return scores


def some_ids(length: int) -> list[int]:
    return [(37 * index + 11) % 300 + 20 for index in range(length)]


def check(entries: list[dict[str, Any]], ids: list[int], expected: torch.Tensor) -> None:
    """vLLM's prompt_logprobs: null, then for each token the most probable ones and itself."""
    assert entries[0] is None
    assert len(entries) == len(ids)
    for position, entry in enumerate(entries[1:]):
        token = ids[position + 1]
        row = expected[position]
        assert str(token) in entry
        for name, found in entry.items():
            assert found["logprob"] == pytest.approx(float(row[int(name)]), abs=1e-3)
            assert found["rank"] == int((row > row[int(name)] + 1e-6).sum()) + 1
        assert str(int(row.argmax())) in entry


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_scores_are_the_same_with_a_cached_prefix(server: Any, reference: Any, length: int) -> None:
    ids = some_ids(length)
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    server.post(COMPLETIONS, {"prompt": ids, "max_tokens": 1})
    first, second = server.post(COMPLETIONS, body), server.post(COMPLETIONS, body)
    scores = [answer["choices"][0]["prompt_logprobs"] for answer in (first, second)]
    check(scores[0], ids, reference(ids))
    assert scores[1] == scores[0]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    echoed = server.post(COMPLETIONS, {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1})
    values = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert values[1:length] == pytest.approx(
        [entry[str(ids[i + 1])]["logprob"] for i, entry in enumerate(scores[0][1:])]
    )


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_gives_the_prompt_and_its_scores(server: Any, tokenizer: Any, reference: Any, max_tokens: int) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    whole, _ = both(server, COMPLETIONS, {**body, "ignore_eos": True, "return_token_ids": True})
    choice = whole["choices"][0]
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids + choice["token_ids"]
    logprobs = choice["logprobs"]
    assert choice["text"] == tokenizer.decode(ids)
    assert choice["text"].startswith(TEXT)
    assert (choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", max_tokens)
    count = whole["usage"]["prompt_tokens"] + max_tokens
    assert {name: len(column) for name, column in logprobs.items()} == dict.fromkeys(logprobs, count)
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    expected = reference(ids)
    chosen = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert logprobs["token_logprobs"][1:] == pytest.approx(chosen, abs=1e-2)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        # A token that holds only a part of a character has no text of its own.
        assert token.startswith("bytes:") or choice["text"][start:].startswith(token)
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token in top


def test_echo_without_scores_and_several_prompts(server: Any, tokenizer: Any) -> None:
    prompts = [TEXT, "The mill grinds", "c"]
    body = {"prompt": prompts, "echo": True, "max_tokens": 3, "temperature": 0, "n": 2}
    whole, _ = both(server, COMPLETIONS, body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert all(text.startswith(prompts[index // 2]) for index, text in enumerate(texts))
    plain = server.post(COMPLETIONS, {**body, "echo": False})
    assert texts == [prompts[i // 2] + choice["text"] for i, choice in enumerate(plain["choices"])]
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    from_ids = server.post(COMPLETIONS, {**body, "prompt": ids, "n": 1, "max_tokens": 0})
    assert from_ids["choices"][0]["text"] == TEXT


def test_scoring_like_an_evaluation_harness(server: Any, reference: Any) -> None:
    """Batches of token ids, one token generated, the prompt's scores wanted."""
    prompts = [some_ids(length) for length in (5, 40, 17)]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    answer = server.post(COMPLETIONS, body)
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == len(ids) + 1
        chosen = reference(ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert values[1:-1] == pytest.approx(chosen, abs=1e-2)


def test_no_tokens_without_echo_or_scores_is_refused(server: Any) -> None:
    for fields in ({"max_tokens": 0}, {"max_tokens": -1, "echo": True}):
        status, error = refusal(server, COMPLETIONS, {"prompt": TEXT, **fields})
        assert (status, error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("k", [0, 1, 20])
def test_output_scores_of_both_endpoints(server: Any, tokenizer: Any, reference: Any, k: int) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    whole, _ = both(server, COMPLETIONS, {"prompt": TEXT, "logprobs": k, **fields})
    choice = whole["choices"][0]
    prompt = tokenizer(TEXT, add_special_tokens=False).input_ids
    expected = reference(prompt + choice["token_ids"])[len(prompt) - 1 :]
    chosen = [float(row[token]) for row, token in zip(expected, choice["token_ids"], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-3)
    for top, row in zip(choice["logprobs"]["top_logprobs"], expected, strict=True):
        assert sorted(top.values(), reverse=True)[:k] == pytest.approx(row.topk(k).values.tolist(), abs=1e-3)
    messages = [{"role": "user", "content": "weather"}]
    chat, _ = both(server, CHAT, {"messages": messages, "logprobs": True, "top_logprobs": k, **fields})
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == chat["usage"]["completion_tokens"] == 12
    for entry in content:
        assert len(entry["top_logprobs"]) == k
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}


def test_scores_are_of_the_model_not_of_the_sampler(server: Any) -> None:
    """A bias forces a token; its log-probability stays the model's own."""
    body = {"prompt": TEXT, "logprobs": 3, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    plain = server.post(COMPLETIONS, body)["choices"][0]
    forced = server.post(COMPLETIONS, {**body, "logit_bias": {str(VOCABULARY - 1): 100}})["choices"][0]
    assert forced["token_ids"] == [VOCABULARY - 1]
    top = plain["logprobs"]["top_logprobs"][0]
    assert forced["logprobs"]["top_logprobs"][0].items() >= top.items()
    assert forced["logprobs"]["token_logprobs"][0] < min(top.values())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": "5"}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
    ],
    ids=str,
)
def test_wrong_wishes_are_refused_by_name(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    status, error = refusal(server, path, {**body, **fields})
    assert (status, error["param"]) == (400, param)
