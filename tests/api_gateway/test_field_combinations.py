"""Whatever is combined: a stream joins to the whole answer, and usage counts what came."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from conftest import Served, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from joined_answers import Answer, ask

PROMPTS = st.one_of(
    st.lists(st.sampled_from(["say", "burst", "held", "late", "é 🫠龜", ""]), min_size=1, max_size=3).map(" ".join),
    st.lists(st.integers(0, 999), min_size=1, max_size=6),
)
COMMON = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(0, 6),
    "stop": st.sampled_from([[], ["END"]]),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
}
COMPLETIONS = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            PROMPTS, st.lists(PROMPTS, min_size=1, max_size=3).filter(lambda p: len(set(map(type, p))) == 1)
        )
    },
    optional={**COMMON, "logprobs": st.integers(0, 20), "echo": st.booleans()},
)
CHATS = st.fixed_dictionaries(
    {"messages": st.sampled_from(["say", "burst", "held"]).map(lambda word: [{"role": "user", "content": word}])},
    optional={**COMMON, "logprobs": st.booleans()},
)
OPTIONS = st.fixed_dictionaries({"include_usage": st.just(True)}, optional={"continuous_usage_stats": st.booleans()})


def allowed(body: dict[str, Any]) -> dict[str, Any]:
    """Without the combinations that are refused."""
    if not body.get("echo") and body.get("max_tokens") == 0:
        body["max_tokens"] = 1
    if "messages" in body and body.get("logprobs"):
        body["top_logprobs"] = body.get("max_tokens", 20)
    return body


async def check(served: Served, body: dict[str, Any], options: dict[str, Any]) -> None:
    kind = "chat" if "messages" in body else "completions"
    whole = await ask(served, kind, body)
    streamed = await ask(served, kind, {**body, "stream_options": options}, stream=True)
    assert streamed == whole
    _check_counts(whole, body)


def _check_counts(answer: Answer, body: dict[str, Any]) -> None:
    assert answer.usage is not None
    wanted = body.get("max_tokens", 4 if "messages" in body else 16)
    assert answer.usage["completion_tokens"] == wanted * len(answer.choices)
    assert len(answer.choices) % body.get("n", 1) == 0
    for choice in answer.choices:
        assert choice.finish_reason == ("stop" if body.get("stop") else "length")
        if body.get("return_token_ids"):
            assert choice.token_ids == list(range(wanted))
        asked = body.get("logprobs")
        if asked is None or asked is False:
            assert choice.logprobs is None
        elif wanted or body.get("echo"):
            assert choice.logprobs is not None
            (length,) = {len(entries) for entries in choice.logprobs.values()}
            assert (length > wanted) if body.get("echo") else (length == wanted)


def test_streams_join_to_the_whole_answer(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        context = serving(tmp_path)
        served = runner.run(runner.run(context.__aenter__())())

        @settings(max_examples=60, deadline=None)
        @given(st.one_of(COMPLETIONS, CHATS).map(allowed), OPTIONS)
        def run(body: dict[str, Any], options: dict[str, Any]) -> None:
            runner.run(check(served, body, options))

        try:
            run()
        finally:
            runner.run(context.__aexit__(None, None, None))
