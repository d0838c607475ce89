"""What clients see of the whole server: answers, streams, the openai package, bad requests."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from typing import Any

import openai
import pytest

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def client(demo: Any) -> Any:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def streamed(client: Any, **body: Any) -> tuple[str, str | None]:
    """The joined text of a streamed completion and its finish reason."""
    text, reason = "", None
    for chunk in client.completions.create(model="demo", stream=True, **body):
        for choice in chunk.choices:
            assert reason is None, "a chunk after the finish reason"
            text += choice.text
            reason = choice.finish_reason
    return text, reason


def test_the_demo_model_knows_paris(client: Any) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "prompt",
    ["Once upon a time", "Emoji: 😀🎉🫠 and more emoji: 🎈", "你好，世界。今天天气", "日本語のテキスト: こんにちは"],
)
def test_streamed_deltas_join_to_the_whole_text(client: Any, prompt: str) -> None:
    body = {"prompt": prompt, "temperature": 0.8, "seed": 7, "max_tokens": 48}
    whole = client.completions.create(model="demo", **body).choices[0]
    assert streamed(client, **body) == (whole.text, whole.finish_reason)
    assert whole.text


def test_stop_strings_inside_and_across_tokens(client: Any) -> None:
    body = {"prompt": "The numbers are: one, two, three, four,", "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(model="demo", **body).choices[0].text
    assert len(whole) > 12
    for start, end in ((2, 5), (5, 12), (7, 8)):
        stop = whole[start:end]
        expected = whole[: whole.index(stop)]
        choice = client.completions.create(model="demo", stop=[stop], **body).choices[0]
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        assert streamed(client, stop=[stop], **body) == (expected, "stop")


def test_eight_calls_of_the_openai_client(client: Any) -> None:
    listed = client.models.list()
    assert [model.id for model in listed.data] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    chat = client.chat.completions.create(model="demo", messages=QUESTION, max_completion_tokens=8, temperature=0)
    assert chat.usage.completion_tokens == 8
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 8
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], chat.usage.total_tokens)
    text = client.completions.create(model="demo", prompt="Hello", max_tokens=4, temperature=0)
    assert text.usage.completion_tokens == 4
    batch = client.completions.create(model="demo", prompt=["Hello", "Good"], max_tokens=4, temperature=0)
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.choices[0].text == text.choices[0].text
    several = client.completions.create(model="demo", prompt="Hello", n=3, seed=1, max_tokens=6)
    assert len({choice.text for choice in several.choices}) > 1
    with client.completions.create(model="demo", prompt=[1, 504, 6330, 282], max_tokens=4, stream=True) as stream:
        assert sum(bool(chunk.choices) for chunk in stream) >= 1
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=QUESTION)


BAD: list[tuple[str, Any, int, str | None]] = [
    ("/v1/completions", b"{", 400, None),
    ("/v1/completions", b"[]", 400, None),
    ("/v1/completions", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    ("/v1/completions", {"model": "nobody", "prompt": "x"}, 404, "model"),
    ("/v1/completions", {"prompt": "word " * 20000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 8192}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [49152]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [2**40]}, 400, "prompt"),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, None),
    ("/v1/completions", {"prompt": "x", "n": 10**9}, 400, "n"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "x" * 5_000_000}, 413, None),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [None]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": QUESTION, "temperature": -1}, 400, "temperature"),
    ("/nowhere", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_refused_and_the_next_one_served(
    demo: Any, path: str, body: Any, status: int, param: str | None
) -> None:
    if isinstance(body, dict):
        body = json.dumps({"model": "demo", **body}).encode()
    parts = urllib.parse.urlsplit(demo.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    start = time.monotonic()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    took = time.monotonic() - start
    connection.close()
    assert answer.status == status, error
    assert error["message"]
    assert error["param"] == param or param is None, error
    assert set(error) == {"message", "type", "param", "code"}
    assert took < 10, "it must not hang"
    follow = demo.post("/v1/completions", {"model": "demo", "prompt": "Hello", "max_tokens": 1, "temperature": 0})
    assert follow["usage"]["completion_tokens"] == 1


def test_cached_tokens_are_told_however_the_answer_ends(client: Any) -> None:
    body = {"prompt": "A long enough prompt to fill two blocks of the cache: " * 4, "temperature": 0, "max_tokens": 12}
    text = client.completions.create(model="demo", **body).choices[0].text
    for stop in (None, [text[3:6]]):
        usage = client.completions.create(model="demo", stop=stop, **body).usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert 16 <= cached < usage.prompt_tokens
        assert cached % 16 == 0


def test_a_reset_prefix_cache_holds_nothing(demo: Any) -> None:
    body = {"model": "demo", "prompt": "Forgotten things come again. " * 6, "max_tokens": 2, "temperature": 0}

    def cached() -> int:
        details = demo.post("/v1/completions", body)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    cached()
    before = cached()
    told = demo.post("/reset_prefix_cache", {})
    assert before >= 32
    assert told["success"] is True
    assert (told["forgotten_blocks"] >= before // 16, told["held_blocks"]) == (True, 0)
    assert (cached(), cached()) == (0, before)
    assert demo.post("/reset_prefix_cache", {})["forgotten_blocks"] >= before // 16
