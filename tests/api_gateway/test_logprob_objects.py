"""Log-probability objects made from records: names, bytes, offsets, and numbers that JSON does not have."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
from fake_tokenizer import Token, record_of
from hypothesis import given
from hypothesis import strategies as st

from api_gateway.logprobs import ChatLogprobs, CompletionLogprobs, mean_logprob, prompt_logprobs
from shared.messages import PromptInfo


def completion(tokens: list[Token], top: int = 0, *, as_ids: bool = False, echoed: PromptInfo | None = None) -> Any:
    made = CompletionLogprobs(top, tokens_as_ids=as_ids, echoed=echoed)
    made.add([record_of(token, top) for token in tokens])
    return made.take()


def chat(tokens: list[Token], top: int = 0, *, as_ids: bool = False) -> Any:
    made = ChatLogprobs(top, tokens_as_ids=as_ids)
    made.add([record_of(token, top) for token in tokens])
    taken = made.take()
    assert taken is not None
    return taken["content"]


def info(*texts: bytes, top: int = 0) -> PromptInfo:
    tokens = [Token(number, text, "") for number, text in enumerate(texts)]
    ids = np.arange(len(texts), dtype=np.int32).tobytes()
    text = b"".join(texts).decode(errors="replace")
    return PromptInfo([record_of(token, top) for token in tokens[1:]], ids, text, texts[0])


def test_bytes_of_chat_entries_are_the_tokens_own() -> None:
    parts = ["今天".encode(), "🫠".encode()[:2], "🫠".encode()[2:], b" ok", b""]
    content = chat([Token(number, part, "") for number, part in enumerate(parts)])
    assert [bytes(entry["bytes"]) for entry in content] == parts
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "今天🫠 ok"
    assert [entry["token"] for entry in content] == ["今天", "\ufffd", "\ufffd\ufffd", " ok", ""]
    assert len(content[0]["bytes"]) == 6


def test_bytes_of_chat_entries_are_null_only_without_text() -> None:
    content = chat([Token(5, None, ""), Token(6, b"", "")])
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("", None), ("", [])]


def test_completions_spell_parts_of_characters_as_bytes() -> None:
    whole = "€".encode()
    made = completion([Token(1, whole, ""), Token(2, whole[:2], ""), Token(3, whole[2:], ""), Token(4, None, "")])
    assert made["tokens"] == ["€", "bytes:\\xe2\\x82", "bytes:\\xac", ""]
    assert [list(top) for top in made["top_logprobs"]] == [[name] for name in made["tokens"]]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30, np.finfo(np.float32).min])
def test_numbers_that_json_lacks_are_clamped(value: float) -> None:
    token = Token(1, b"a", "", float(value), [(2, b"b", -0.1), (3, b"c", float(value))])
    made: list[Any] = [completion([token], 2), chat([token], 2), prompt_logprobs(PromptInfo([record_of(token, 2)]), 2)]
    for each in made:
        text = orjson.dumps(each).decode()
        assert "-9999.0" in text
        assert json.loads(text, parse_constant=pytest.fail) == each
    assert made[0]["token_logprobs"] == [-9999.0]
    assert mean_logprob([record_of(token, 2)]) == -9999.0


def test_the_token_itself_is_always_among_the_most_probable_ones() -> None:
    others: list[tuple[int, bytes | None, float]] = [(7, b"x", -0.1), (8, b"y", -0.2)]
    (top,) = completion([Token(1, b"a", "", -5.0, others)], 2)["top_logprobs"]
    assert top == pytest.approx({"x": -0.1, "y": -0.2, "a": -5.0})
    (top,) = completion([Token(7, b"x", "", -0.1, others)], 2)["top_logprobs"]
    assert top == pytest.approx({"x": -0.1, "y": -0.2})
    (top,) = completion([Token(1, b"a", "", -5.0, others)], 0)["top_logprobs"]
    assert top == {"a": -5.0}
    assert [entry["token"] for entry in chat([Token(1, b"a", "", -5.0, others)], 2)[0]["top_logprobs"]] == ["x", "y"]


def test_ids_of_the_same_text_do_not_hide_the_token() -> None:
    others: list[tuple[int, bytes | None, float]] = [(7, b"a", -0.1), (8, b"b", -0.2), (9, b"b", -0.3)]
    made = completion([Token(1, b"a", "", -5.0, others)], 3)
    assert made["top_logprobs"][0] == pytest.approx({"a": -5.0, "b": -0.2})
    hidden = Token(2, b"", "", -0.1, [(2, b"<eos>", -0.1), (7, b"a", -3.0)])
    assert completion([hidden], 2)["top_logprobs"][0] == pytest.approx({"": -0.1, "a": -3.0})


def test_tokens_as_ids() -> None:
    token = Token(1, b"a", "", -1.0, [(7, None, -0.5), (1, b"a", -1.0)])
    made = completion([token], 2, as_ids=True)
    assert made["tokens"] == ["token_id:1"]
    assert made["top_logprobs"] == [{"token_id:7": -0.5, "token_id:1": -1.0}]
    (entry,) = chat([token], 2, as_ids=True)
    assert (entry["token"], entry["bytes"]) == ("token_id:1", [97])
    assert [other["token"] for other in entry["top_logprobs"]] == ["token_id:7", "token_id:1"]
    made = completion([token], as_ids=True, echoed=info(b"x", b"y"))
    assert made["tokens"] == ["token_id:0", "token_id:1", "token_id:1"]


def test_prompt_comes_first_without_a_value_for_its_first_token() -> None:
    made = completion([Token(9, b"!", "")], 1, echoed=info("né".encode(), b"e ", b"x", top=1))
    assert made["tokens"] == ["né", "e ", "x", "!"]
    assert made["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert made["top_logprobs"][0] is None
    assert all(name in top for name, top in zip(made["tokens"][1:], made["top_logprobs"][1:], strict=True))
    assert made["text_offset"] == [0, 2, 4, 5]


def test_a_prompt_of_one_token_has_one_entry() -> None:
    assert completion([], 1, echoed=info(b"x"))["token_logprobs"] == [None]
    assert prompt_logprobs(info(b"x"), 1) == [None]


def test_offsets_within_a_character_are_that_characters() -> None:
    face = "🫠".encode()
    made = completion([Token(1, part, "") for part in (b"a", face[:1], face[1:3], face[3:], b"b", b"")])
    assert made["text_offset"] == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize(("first", "second"), [(b"<s>", b"a"), (b"", b"a"), (b"<s>", b" a")])
def test_offsets_count_the_text_and_not_what_it_leaves_out(first: bytes, second: bytes) -> None:
    told = info(first, second, b"b")
    told = PromptInfo(told.records, told.ids, "ab", told.first)
    assert completion([Token(1, b"c", "")], echoed=told)["text_offset"] == [0, 0, 1, 2]


def test_offsets_after_a_prompt_that_ends_within_a_character() -> None:
    assert completion([Token(1, b"c", "")], echoed=info(b"a", b"\xf0\x9f"))["text_offset"] == [0, 1, 2]


@given(st.text(), st.lists(st.integers(0, 40), max_size=8))
def test_offsets_count_the_whole_characters_before_a_token(text: str, cuts: list[int]) -> None:
    data = text.encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    made = completion([Token(1, data[a:b], "") for a, b in itertools.pairwise(places)])
    assert made["text_offset"] == [len(data[:place].decode(errors="ignore")) for place in places[:-1]]


@given(st.lists(st.text(min_size=1), min_size=1), st.lists(st.text()))
def test_each_token_stands_at_its_offset(prompt: list[str], output: list[str]) -> None:
    tokens = [Token(1, part.encode(), part) for part in output]
    made = completion(tokens, echoed=info(*(part.encode() for part in prompt)))
    text = "".join(prompt + output)
    lengths = {len(made[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(prompt) + len(output)}
    assert all(text.startswith(*pair) for pair in zip(made["tokens"], made["text_offset"], strict=True))


def test_prompt_lists_name_ranks() -> None:
    others: list[tuple[int, bytes | None, float]] = [(7, b"x", -0.1), (8, b"\xff", -0.2), (9, None, -0.3)]
    records = [record_of(Token(1, b"a", "", -5.0, others), 3), record_of(Token(8, b"\xff", "", -0.2, others), 3)]
    made = prompt_logprobs(PromptInfo(records), 2)
    assert made[0] is None
    assert made[1] is not None
    assert made[2] is not None
    assert [(key, value["rank"], value["decoded_token"]) for key, value in made[1].items()] == [
        ("1", 50, "a"),
        ("7", 1, "x"),
        ("8", 2, "\ufffd"),
    ]
    assert [(key, value["rank"]) for key, value in made[2].items()] == [("8", 2), ("7", 1)]
    assert list(prompt_logprobs(PromptInfo(records), 0)[1] or {}) == ["1"]
    assert (prompt_logprobs(PromptInfo(records), 3)[1] or {})["9"]["decoded_token"] == ""
