"""How text leaves the server when the tokens are awkward: a model that says exactly what each test wants."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.streams import CHAT, COMPLETIONS, Joined, both, refusal, stream_of
from tests.scripted_model import Scripts, make_scripted_checkpoint

EMOJI = ["a", b"\xf0\x9f", b"\xab", b"\xa0", "b", b"\xf0", b"\x9f\xa5", b"\xb9", b"\xe9", b"\xbe", b"\x9c"]
"""a🫠b🥹龜, no character of which but a and b is one token; one token holds half of a character of four bytes."""
SCRIPTS: dict[str, list[str | bytes]] = {
    "emoji": EMOJI,
    "cut": ["x", b"\xf0\x9f\x98", b"\x81"],
    "broken": ["ok", b"\xff", " then"],
    "alphabet": ["DEF", "G", "HI", "J", "KLM"],
    "observatory": ["I", " see.", " Obs", "ervatory", "!"],
    "newlines": ["one", "\n", "two", "\n\n", "three"],
    "word": ["stop", "ping", " here"],
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Scripts]:
    folder = tmp_path_factory.mktemp("scripted")
    return folder, make_scripted_checkpoint(folder, SCRIPTS)


@pytest.fixture(scope="module")
def server(start: Any, scripts: tuple[Any, Scripts]) -> Any:
    return start(str(scripts[0]), "--dtype", "float32", "--kv-cache-bytes", "4M")


@pytest.fixture
def body(scripts: tuple[Any, Scripts]) -> Any:
    """``body(name, …)``: a request that is answered with a script."""

    def make(name: str, **fields: Any) -> dict[str, Any]:
        return {"prompt": [scripts[1].starts[name]], "max_tokens": 32, "temperature": 0, **fields}

    return make


# -- characters split over tokens --------------------------------------------------------------------------------------


def test_characters_split_over_tokens(server: Any, body: Any) -> None:
    whole, joined = both(server, COMPLETIONS, body("emoji"))
    assert whole["choices"][0]["text"] == "a🫠b🥹龜"
    assert whole["usage"]["completion_tokens"] == len(EMOJI) + 1
    assert all("�" not in choice["text"] for chunk in joined.chunks for choice in chunk["choices"])


def test_a_whole_character_does_not_wait_for_a_split_one(server: Any, body: Any) -> None:
    chunks = stream_of(server, COMPLETIONS, body("emoji", max_tokens=1))
    assert Joined(chunks).text == {0: "a"}
    parts = [choice["text"] for chunk in stream_of(server, COMPLETIONS, body("emoji")) for choice in chunk["choices"]]
    texts = [part for part in parts if part]
    assert "".join(texts) == "a🫠b🥹龜"
    assert texts[0] == "a"


@pytest.mark.parametrize("max_tokens", range(1, len(EMOJI) + 1))
def test_a_text_cut_inside_a_character_ends_alike(server: Any, body: Any, max_tokens: int) -> None:
    whole, _ = both(server, COMPLETIONS, body("emoji", max_tokens=max_tokens))
    choice = whole["choices"][0]
    assert (choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", max_tokens)
    assert "a🫠b🥹龜".startswith(choice["text"].rstrip("�"))


def test_bytes_that_are_no_character_become_replacement_characters(server: Any, body: Any) -> None:
    whole, _ = both(server, COMPLETIONS, body("broken"))
    assert whole["choices"][0]["text"] == "ok� then"


# -- bytes of log-probabilities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_bytes_of_the_entries_join_to_the_text(server: Any, body: Any, name: str) -> None:
    entries = _chat_entries(server, name)
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    expected = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in SCRIPTS[name])
    assert raw == expected
    assert raw.decode(errors="replace") == server.post(COMPLETIONS, body(name))["choices"][0]["text"]


def _chat_entries(server: Any, name: str) -> list[dict[str, Any]]:
    fields = {"messages": [{"role": "user", "content": f"<|{name}|>"}], "max_tokens": 32, "temperature": 0}
    whole, _ = both(server, CHAT, {**fields, "logprobs": True, "top_logprobs": 2})
    choice = whole["choices"][0]
    assert whole["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
    entries: list[dict[str, Any]] = choice["logprobs"]["content"]
    return entries


# -- stop strings ------------------------------------------------------------------------------------------------------

STOPS = [
    (["DEFGHIJ"], "", "DEFGHIJ"),
    (["DE"], "", "DE"),
    (["EFG"], "D", "EFG"),
    (["HIJKL"], "DEFG", "HIJKL"),
    (["HIJX", "GHIJ", "IJ"], "DEF", "GHIJ"),
    (["M", "K"], "DEFGHIJ", "K"),
]


@pytest.mark.parametrize(("stop", "text", "reason"), STOPS)
def test_stop_strings_not_aligned_to_tokens(server: Any, body: Any, stop: list[str], text: str, reason: str) -> None:
    whole, joined = both(server, COMPLETIONS, body("alphabet", stop=stop))
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
    shown, _ = both(server, COMPLETIONS, body("alphabet", stop=stop, include_stop_str_in_output=True))
    assert shown["choices"][0]["text"] == text + reason
    assert joined.text == {0: text}


def test_an_empty_stop_string_is_refused(server: Any, body: Any) -> None:
    status, error = refusal(server, COMPLETIONS, body("alphabet", stop=["x", ""]))
    assert (status, error["param"]) == (400, "stop")


# -- the held-back tail ------------------------------------------------------------------------------------------------


def test_only_a_live_beginning_of_a_stop_string_is_held_back(server: Any, body: Any) -> None:
    fields = body("observatory", stop=["\nObservation:", " Observation:"])
    whole, joined = both(server, COMPLETIONS, fields)
    assert whole["choices"][0]["text"] == "I see. Observatory!"
    texts = [choice["text"] for chunk in joined.chunks for choice in chunk["choices"]]
    assert all(text for text in texts[:-1]), "a chunk without text"
    for length, expected in ((1, "I"), (2, "I see."), (3, "I see. Obs"), (4, "I see. Observatory")):
        assert Joined(stream_of(server, COMPLETIONS, {**fields, "max_tokens": length})).text == {0: expected}


# -- end conditions ----------------------------------------------------------------------------------------------------


def test_end_conditions_wait_for_min_tokens(server: Any, body: Any) -> None:
    whole, _ = both(server, COMPLETIONS, body("newlines", stop=["\n"], min_tokens=3))
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("one\ntwo", 4)
    plain, _ = both(server, COMPLETIONS, body("newlines", stop=["\n"]))
    assert (plain["choices"][0]["text"], plain["usage"]["completion_tokens"]) == ("one", 2)


def test_ignore_eos_goes_on_to_the_length_and_stop_ids_still_end(server: Any, scripts: Any, body: Any) -> None:
    whole, _ = both(server, COMPLETIONS, body("word", ignore_eos=True))
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 32)
    stop = scripts[1].ids["word"][1]
    ended, _ = both(server, COMPLETIONS, body("word", ignore_eos=True, stop_token_ids=[stop]))
    choice = ended["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("stop", "stop", stop)


# -- usage chunks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_chunks_come_only_when_asked_for(server: Any, body: Any, options: Any) -> None:
    chunks = stream_of(server, COMPLETIONS, body("word", stream_options=options))
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("n", [1, 3])
def test_the_usage_chunk_is_the_last_one_and_has_no_choices(server: Any, body: Any, n: int) -> None:
    fields = body("word", n=n)
    whole = server.post(COMPLETIONS, fields)
    chunks = stream_of(server, COMPLETIONS, {**fields, "stream_options": {"include_usage": True}})
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    assert whole["usage"]["completion_tokens"] == 4 * n


@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_grows_to_what_was_produced(server: Any, body: Any, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream_of(server, COMPLETIONS, body("emoji", n=n, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == n * (len(EMOJI) + 1)


def test_stream_options_need_a_stream(server: Any, body: Any) -> None:
    status, error = refusal(server, COMPLETIONS, body("word", stream_options={"include_usage": True}))
    assert (status, error["param"]) == (400, "stream_options")
