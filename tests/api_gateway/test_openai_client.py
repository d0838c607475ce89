"""The ``openai`` package against a gateway on a real port."""

from __future__ import annotations

from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(served: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_models(client: Any) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    model = await client.models.retrieve("demo")
    assert model.max_model_len == 512
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("a/b")
    assert caught.value.param == "model"


async def test_chat(client: Any) -> None:
    answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, stop=["END"])
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "0:0 0:1 0:2 ")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "END")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 3, 8)
    assert usage.prompt_tokens_details.cached_tokens == 2


async def test_chat_stream(client: Any) -> None:
    stream = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "0:0 0:1 0:2 "
    assert chunks[-1].choices[0].delta.content is None
    assert all(c.usage is None for c in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_choices(client: Any, stream: bool) -> None:
    body: Any = {"model": "demo", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await client.completions.create(**body)
    texts: dict[int, str] = dict.fromkeys(range(6), "")
    reasons: dict[int, list[Any]] = {index: [] for index in texts}
    if stream:
        async for chunk in answer:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index].append(choice.finish_reason)
    else:
        usage = answer.usage
        assert [choice.index for choice in answer.choices] == list(range(6))
        for choice in answer.choices:
            texts[choice.index] = choice.text
            reasons[choice.index].append(choice.finish_reason)
    assert texts == {i: f"{i % 2}:0 {i % 2}:1 {i % 2}:2 " for i in range(6)}
    assert all(r[-1] == "length" and set(r[:-1]) <= {None} for r in reasons.values())
    assert (usage.prompt_tokens, usage.completion_tokens) == (15, 18)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_asked(client: Any, options: Any) -> None:
    extra = {} if options is None else {"stream_options": options}
    stream = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, stream=True, **extra)
    async for chunk in stream:
        assert chunk.usage is None
        assert chunk.choices


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("word", ["hello", "burst"])
async def test_usage_chunks(client: Any, kind: str, continuous: bool, word: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    common: Any = {"model": "demo", "max_tokens": 6, "n": 2, "stream": True, "stream_options": options}
    if kind == "chat":
        stream = await client.chat.completions.create(messages=[{"role": "user", "content": word}], **common)
    else:
        stream = await client.completions.create(prompt=word, **common)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert all(chunk.choices for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)
    counts = [chunk.usage.completion_tokens for chunk in chunks[:-1] if chunk.usage is not None]
    assert counts == sorted(counts)
    assert len(counts) == (len(chunks) - 1 if continuous else 0)
    assert not continuous or counts[-1] == 12


async def test_token_ids(client: Any) -> None:
    asked: Any = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "extra_body": {"return_token_ids": True}}
    answer = await client.completions.create(**asked)
    assert answer.choices[0].token_ids == [0, 1, 2, 3]
    stream = await client.completions.create(stream=True, **asked)
    ids = [token async for chunk in stream for token in chunk.choices[0].token_ids]
    assert ids == [0, 1, 2, 3]


async def test_chat_logprobs(client: Any) -> None:
    asked: Any = {"model": "demo", "messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    answer = await client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["0:0 ", "0:1 ", "0:2 "]
    assert [bytes(entry.bytes).decode() for entry in content] == ["0:0 ", "0:1 ", "0:2 "]
    assert [entry.logprob for entry in content] == [-0.5, -1.0, -1.5]
    assert [[other.token for other in entry.top_logprobs] for entry in content] == [
        ["0:0 ", "t902"],
        ["t901", "0:1 "],
        ["t901", "t902"],
    ]
    streamed = []
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


async def test_completions_logprobs_with_echo(client: Any) -> None:
    asked: Any = {"model": "demo", "prompt": [[5, 6], [7]], "max_tokens": 1, "logprobs": 1, "echo": True}
    answer = await client.completions.create(temperature=0, seed=1234, **asked)
    assert [choice.text for choice in answer.choices] == ["<5><6>0:0 ", "<7>0:0 "]
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["<5>", "<6>", "0:0 "]
    assert logprobs.token_logprobs == [None, -0.5, -0.5]
    assert logprobs.top_logprobs == [None, {"<6>": -0.5}, {"0:0 ": -0.5}]
    assert logprobs.text_offset == [0, 3, 6]
    async for chunk in await client.completions.create(stream=True, **asked):
        if chunk.choices[0].index == 0 and chunk.choices[0].text:
            assert chunk.choices[0].logprobs == logprobs


async def test_prompt_logprobs(client: Any) -> None:
    extra = {"prompt_logprobs": 0}
    answer = await client.completions.create(model="demo", prompt=[5, 6], max_tokens=0, extra_body=extra)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("", 0)
    expected = [None, {"6": {"logprob": -0.5, "rank": 1, "decoded_token": "<6>"}}]
    assert answer.choices[0].prompt_logprobs == expected
    answer = await client.chat.completions.create(model="demo", messages=HELLO, extra_body=extra)
    assert len(answer.prompt_logprobs) == 5


async def test_best_of(client: Any) -> None:
    answer = await client.completions.create(model="demo", prompt="x", max_tokens=2, n=2, best_of=4)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "0:0 0:1 "), (1, "3:0 3:1 ")]
    assert answer.usage.completion_tokens == 8


async def test_errors_have_their_class_and_param(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)
    assert (caught.value.param, caught.value.type, caught.value.code) == ("temperature", "invalid_request_error", "400")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=HELLO)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="demo", prompt="reject", stream=stream)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="demo", prompt="full", stream=stream)
        with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: "):
            await client.completions.create(model="demo", prompt=["hold", "reject"], stream=stream)


async def test_error_after_the_headers(client: Any) -> None:
    stream = await client.completions.create(model="demo", prompt="break", max_tokens=10, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError, match="the engine broke"):
        await read()
    assert "".join(texts) == "0:0 0:1 0:2 "
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        await client.completions.create(model="demo", prompt="break", max_tokens=10)
