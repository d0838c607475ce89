"""Log-probabilities, echoed prompts, scored prompts and the best of several choices, as clients get them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_tokenizer import Script, Token
from joined_answers import ask

from shared.messages import End, FinishReason

BOTH = pytest.mark.parametrize("stream", [False, True])


def bodies(word: str, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The same for both endpoints."""
    top = fields.pop("top", None)
    asked_of_chat = {} if top is None else {"logprobs": True, "top_logprobs": top}
    asked = {} if top is None else {"logprobs": top}
    return [
        ("chat", {"messages": [{"role": "user", "content": word}], **fields, **asked_of_chat}),
        ("completions", {"prompt": word, **fields, **asked}),
    ]


# -- bytes of tokens -------------------------------------------------------------------------------------------------


@BOTH
async def test_bytes_join_to_the_content_when_characters_span_tokens(served: Any, stream: bool) -> None:
    face, text = "🫠".encode(), "a🫠b龜"
    served.tokenizer.scripts["emoji"] = Script(
        [
            Token(1, b"a", "a"),
            Token(2, face[:2], ""),
            Token(3, face[2:], "🫠"),
            Token(4, b"b", "b"),
            Token(5, "龜".encode(), "龜"),
            Token(6, b"", ""),
        ]
    )
    for kind, body in bodies("emoji", max_tokens=16, top=2):
        answer = await ask(served, kind, body, stream=stream)
        (choice,) = answer.choices
        assert choice.text == text
        assert choice.logprobs is not None
        if kind == "chat":
            content = choice.logprobs["content"]
            assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
            assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
        else:
            assert choice.logprobs["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\xab\\xa0", "b", "龜", ""]
            assert choice.logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]


@BOTH
async def test_ids_without_a_token_are_safe(served: Any, stream: bool) -> None:
    token = Token(999, None, "", float("-inf"), [(998, None, float("-inf")), (1, b"a", -0.5)])
    served.tokenizer.scripts["padded"] = Script([token])
    for kind, body in bodies("padded", max_tokens=16, top=20):
        (choice,) = (await ask(served, kind, body, stream=stream)).choices
        assert choice.logprobs is not None
        if kind == "chat":
            (entry,) = choice.logprobs["content"]
            assert (entry["token"], entry["logprob"], entry["bytes"]) == ("", -9999.0, None)
        else:
            assert choice.logprobs["token_logprobs"] == [-9999.0]
            assert choice.logprobs["top_logprobs"] == [{"": -9999.0, "a": -0.5}]


# -- entries and text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["x", "burst", "held"])
async def test_streamed_entries_are_those_of_the_whole_answer(served: Any, word: str) -> None:
    for kind, body in bodies(word, max_tokens=7, n=2, top=3):
        whole, streamed = await ask(served, kind, body), await ask(served, kind, body, stream=True)
        assert whole.choices == streamed.choices
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert {len(entries) for entries in choice.logprobs.values()} == {7}


async def test_entries_of_held_back_text_go_out_with_their_rows(served: Any) -> None:
    for kind, body in bodies("held", max_tokens=7, top=0):
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        async with served.http.post(served.url + path, json={**body, "stream": True}) as response:
            data = (await response.read()).decode()
        assert data.count('"token_logprobs"' if kind == "completions" else '"content":[') == 7


@BOTH
async def test_entries_outlast_text_that_a_stop_string_cut(served: Any, stream: bool) -> None:
    tokens = [Token(1, b"I see.", "I see."), Token(2, b" Obs", ""), Token(3, b"ervation", "")]
    served.tokenizer.scripts["stops"] = Script(tokens, end=End(FinishReason.STOP, "Observation"))
    for kind, body in bodies("stops", max_tokens=16, stop=["Observation"], top=0):
        answer = await ask(
            served, kind, {**body, "stream_options": {"include_usage": True}} if stream else body, stream=stream
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("I see.", "stop", "Observation")
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == 3
        assert choice.logprobs is not None
        assert len(choice.logprobs["content" if kind == "chat" else "tokens"]) == 3


@BOTH
async def test_nothing_is_shown_that_was_not_asked_for(served: Any, stream: bool) -> None:
    for kind, body in bodies("x", max_tokens=3):
        answer = await ask(served, kind, body, stream=stream)
        assert answer.choices[0].logprobs is None
        assert answer.choices[0].token_ids is None
    assert all(request.spec.params.logprobs is None for request in served.tokenizer.requests)
    assert not any(request.spec.echo for request in served.tokenizer.requests)


# -- echo and scoring ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["Your answer: Yes", "今天天气不错", [5, 6, 7], [5]])
async def test_echo_puts_the_prompt_before_text_and_entries(
    served: Any, stream: bool, max_tokens: int, prompt: Any
) -> None:
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2}
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    answer = await ask(served, "completions", body, stream=stream)
    shown = prompt if isinstance(prompt, str) else "".join(f"<{i}>" for i in prompt)
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 2 * max_tokens
    for index, choice in enumerate(answer.choices):
        assert choice.text == shown + "".join(f"{index}:{k} " for k in range(max_tokens))
        assert choice.finish_reason == "length"
        logprobs = choice.logprobs
        assert logprobs is not None
        assert {len(entries) for entries in logprobs.values()} == {answer.usage["prompt_tokens"] + max_tokens}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        pairs = zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
        assert all(token in top for token, top in pairs)
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        whole = [pair for pair in zip(logprobs["tokens"], offsets, strict=True) if not pair[0].startswith("bytes:")]
        assert all(choice.text.startswith(*pair) for pair in whole)


@BOTH
async def test_echo_alone_needs_no_scores(served: Any, stream: bool) -> None:
    body = {"prompt": ["one two", "three"], "echo": True, "max_tokens": 2, "n": 2}
    answer = await ask(served, "completions", body, stream=stream)
    texts = [choice.text for choice in answer.choices]
    assert texts == ["one two0:0 0:1 ", "one two1:0 1:1 ", "three0:0 0:1 ", "three1:0 1:1 "]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert all(request.spec.params.prompt_logprobs is None for request in served.tokenizer.requests)


@BOTH
async def test_choices_wait_for_the_prompt_that_comes_with_the_first(served: Any, stream: bool) -> None:
    body = {"prompt": ["late one", "late two"], "echo": True, "logprobs": 2, "max_tokens": 3, "n": 3}
    answer = await ask(served, "completions", body, stream=stream)
    assert [choice.text[:8] for choice in answer.choices] == ["late one"] * 3 + ["late two"] * 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs["tokens"]) == 5 + 3
        assert choice.logprobs["token_logprobs"].count(None) == 1


async def test_prompt_logprobs_twice_are_the_same(served: Any) -> None:
    body = {"prompt": list(range(33)), "max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    answers = [(await served.post("/v1/completions", body))[1] for _ in range(2)]
    first, second = ([choice["prompt_logprobs"] for choice in answer["choices"]] for answer in answers)
    assert first == second
    assert first[0] == first[1]
    assert len(first[0]) == answers[0]["usage"]["prompt_tokens"] == 33
    assert first[0][0] is None
    for number, entry in enumerate(first[0][1:], start=1):
        assert next(iter(entry)) == str(number)
        assert {"logprob", "rank", "decoded_token"} == entry[str(number)].keys()
        assert entry[str(number)]["decoded_token"] == f"<{number}>"
        assert 1 in [value["rank"] for value in entry.values()]


async def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(served: Any) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    for max_tokens in (0, 2):
        body = {"messages": messages, "max_tokens": max_tokens, "prompt_logprobs": 0, "n": 2}
        status, answer, _ = await served.post("/v1/chat/completions", body)
        assert status == 200
        assert [len(entry or ()) for entry in answer["prompt_logprobs"]] == [0, 1, 1, 1, 1]
        assert all("prompt_logprobs" not in choice for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens


async def test_scores_of_the_prompt_and_of_the_echo_have_their_own_widths(served: Any) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 4, "echo": True, "logprobs": 1}
    _, answer, _ = await served.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 4, 4]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 2, 1, 1]


@BOTH
async def test_nothing_is_generated_only_where_a_prompt_is_asked_about(served: Any, stream: bool) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        for name in ("max_tokens", "max_completion_tokens"):
            status, answer, _ = await served.post(path, {**body, name: 0, "stream": stream})
            assert (status, answer["error"]["param"]) == (400, name)
    assert not served.tokenizer.requests


async def test_a_lost_prompt_is_an_error_and_not_an_answer(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_tokenizer.info_of", lambda request: None)
    for stream in (False, True):
        body = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
        async with served.http.post(served.url + "/v1/completions", json=body) as response:
            text = await response.text()
        assert response.status == (200 if stream else 500)
        assert '"error"' in text
        assert '"text"' not in text


# -- best of several -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "best"), [(1, [0]), (2, [0, 3]), (3, [0, 3, 1])])
async def test_best_of_gives_the_most_probable_choices(served: Any, n: int, best: list[int]) -> None:
    # Per token the choices 0, 3, 1, 2 follow each other.
    body = {"prompt": ["a", "b"], "n": n, "best_of": 4, "max_tokens": 3}
    answer = await ask(served, "completions", body)
    expected = ["".join(f"{choice}:{k} " for k in range(3)) for choice in best]
    assert [choice.text for choice in answer.choices] == expected * 2
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (10, 24)


@BOTH
async def test_best_of_n_is_n(served: Any, stream: bool) -> None:
    answer = await ask(served, "completions", {"prompt": "a", "n": 2, "best_of": 2, "max_tokens": 1}, stream=stream)
    assert [choice.text for choice in answer.choices] == ["0:0 ", "1:0 "]
    assert served.tokenizer.requests[0].spec.params.logprobs is None


async def test_best_of_with_logprobs_and_echo(served: Any) -> None:
    body = {"prompt": "late say", "n": 2, "best_of": 4, "max_tokens": 3, "logprobs": 2, "echo": True}
    answer = await ask(served, "completions", body)
    assert [choice.text[:11] for choice in answer.choices] == ["late say0:0", "late say3:0"]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs["tokens"]) == 8


# -- requests do not mix ---------------------------------------------------------------------------------------------


async def test_requests_with_one_id_keep_their_own_entries(served: Any) -> None:
    def one(prompt: list[int], stream: bool) -> Any:
        body = {"prompt": prompt, "request_id": "same", "echo": True, "logprobs": 0, "max_tokens": 2, "n": 2}
        return ask(served, "completions", body, stream=stream)

    prompts = [[number, number + 1] for number in range(0, 20, 2)]
    answers = await asyncio.gather(*(one(prompt, bool(prompt[0] % 4)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        for index, choice in enumerate(answer.choices):
            assert choice.text == f"<{prompt[0]}><{prompt[1]}>{index}:0 {index}:1 "
            assert choice.logprobs is not None
            assert "".join(choice.logprobs["tokens"]) == choice.text
