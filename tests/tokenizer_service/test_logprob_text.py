"""The bytes of tokens in records: raw, joining to the text, and none where there is no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.logprobs import unpack_text
from shared.messages import PromptInfo
from shared.model_source import ModelSource, resolve_model
from shared.sampling import SamplingParams
from tests.tokenizer_service.gguf_files import sentencepiece_pieces, write_sentencepiece
from tests.tokenizer_service.rig import record
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level, sentencepiece, word_level, word_piece
from tokenizer_service.bad_words import BadWords
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.logprob_text import LogprobText
from tokenizer_service.text_stream import TextStream
from tokenizer_service.vocabulary import load_vocabulary

DEMO = load_vocabulary(resolve_model("demo")).tokenizer
BYTES = byte_level(LLAMA3_SPECIAL)
SENTENCEPIECE, WORDS, WORD_PIECE = sentencepiece(), word_level(), word_piece()
MADE = {id(each): Detokenizer(each) for each in (DEMO, BYTES, SENTENCEPIECE, WORDS, WORD_PIECE)}
TEXT = {
    key: LogprobText(made, made._tokenizer.get_vocab_size() + 8, made._tokenizer.get_vocab_size())
    for key, made in MADE.items()
}


def text_of(tokenizer: Tokenizer) -> LogprobText:
    return TEXT[id(tokenizer)]


def shown(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> list[bytes]:
    """What the record of each generated token says that it adds to the text."""
    stream = TextStream(MADE[id(tokenizer)], [], params, frozenset(eos))
    found = []
    for token_id in ids:
        stream.push(token_id)
        packed = text_of(tokenizer).record(record(token_id, [token_id]), stream.own(token_id))
        found.append(unpack_text(packed).token.text or b"")
    return found


@pytest.mark.parametrize("text", ["今天天气不错", "naïve 🫠 龜", "  12  34", "the quick\n"])
@pytest.mark.parametrize("tokenizer", [DEMO, BYTES], ids=["demo", "trained"])
def test_bytes_are_those_of_the_text_not_of_the_vocabulary(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(text_of(tokenizer).texts[i] or b"" for i in ids) == text.encode()


def test_a_token_of_one_character_has_its_bytes() -> None:
    for character in "é漢":
        assert text_of(SENTENCEPIECE).texts[SENTENCEPIECE.token_to_id(character)] == character.encode()
    assert text_of(SENTENCEPIECE).texts[SENTENCEPIECE.token_to_id("<0xF0>")] == b"\xf0"
    assert text_of(SENTENCEPIECE).texts[SENTENCEPIECE.token_to_id("▁ab")] == b" ab"


def test_words_bring_what_they_put_between_themselves_and_others() -> None:
    for tokenizer, token, expected in (
        (WORDS, "stop", b" stop"),
        (WORD_PIECE, "##ing", b"ing"),
        (WORD_PIECE, "play", b" play"),
        (WORD_PIECE, ".", b"."),
    ):
        assert text_of(tokenizer).texts[tokenizer.token_to_id(token)] == expected


@pytest.mark.parametrize("tokenizer", [DEMO, BYTES, SENTENCEPIECE, WORDS])
def test_special_tokens_are_literal_and_ids_without_a_token_have_none(tokenizer: Tokenizer) -> None:
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        assert text_of(tokenizer).texts[token_id] == token.content.encode()
    size = tokenizer.get_vocab_size()
    assert text_of(tokenizer).texts[size:] == [None] * 8
    position = unpack_text(text_of(tokenizer).record(record(size, [0, size + 7]), b""))
    assert (position.token.text, position.top[1].text) == (None, None)


@pytest.mark.parametrize("tokenizer", [DEMO, BYTES, SENTENCEPIECE], ids=["demo", "trained", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_bytes_of_all_tokens_join_to_the_text(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    split = st.sampled_from(tokenizer.encode("a🫠b🥹龜 c", add_special_tokens=False).ids)
    ids = data.draw(st.lists(split | st.integers(0, min(tokenizer.get_vocab_size() + 7, 500))))
    params = SamplingParams(skip_special_tokens=skip)
    stream = TextStream(MADE[id(tokenizer)], [], params, frozenset())
    text = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert b"".join(shown(tokenizer, ids, params)).decode(errors="replace") == text


@given(ids=st.lists(st.integers(0, 4)))
def test_bytes_of_words_join_to_the_text(ids: list[int]) -> None:
    assert b"".join(shown(WORDS, ids, SamplingParams())).decode() == WORDS.decode(ids)


def test_the_end_token_is_not_shown_but_its_alternatives_are() -> None:
    (end, hello) = DEMO.token_to_id("<|im_end|>"), DEMO.encode("hello").ids[0]
    for params in (SamplingParams(), SamplingParams(skip_special_tokens=False)):
        assert shown(DEMO, [hello, end], params, [end]) == [text_of(DEMO).texts[hello], b""]
    kept = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    assert shown(DEMO, [hello, end], kept, [end])[1] == b"<|im_end|>"
    early = SamplingParams(skip_special_tokens=False, min_tokens=2)
    assert shown(DEMO, [hello, end, end], early, [end])[1:] == [b"<|im_end|>", b""]
    position = unpack_text(text_of(DEMO).record(record(end, [end, hello]), b""))
    assert [each.text for each in (position.token, *position.top)] == [b"", b"<|im_end|>", text_of(DEMO).texts[hello]]


def told(tokenizer: Tokenizer, ids: Sequence[int], text: str, echo: bool = True) -> tuple[PromptInfo, list[bytes]]:
    """What is told of a prompt, and the bytes of all its tokens."""
    made = text_of(tokenizer)
    prompt = made.prompt(np.array(ids, np.int32), text, echo=echo, scored=True)
    info = made.scored(prompt, [record(token_id) for token_id in ids[1:]])
    return info, [info.first, *(unpack_text(each).token.text or b"" for each in info.records)]


def test_bytes_of_a_prompt_join_to_the_text_that_is_echoed() -> None:
    text = "naïve 漢字 fox"
    plain = BYTES.encode(text, add_special_tokens=False).ids
    bos = BYTES.token_to_id(LLAMA3_SPECIAL[0])
    info, parts = told(BYTES, plain, text)
    assert (info.text, np.frombuffer(info.ids, np.int32).tolist()) == (text, plain)
    assert b"".join(parts) == text.encode()
    _, parts = told(BYTES, [bos, *plain], text)
    assert parts[0] == b""
    assert b"".join(parts) == text.encode()
    _, parts = told(BYTES, [bos, *plain], LLAMA3_SPECIAL[0] + text)
    assert parts[0] == LLAMA3_SPECIAL[0].encode()


def test_the_space_that_sentencepiece_puts_first_is_not_part_of_the_echo() -> None:
    ids, bos = SENTENCEPIECE.encode("ab c", add_special_tokens=False).ids, SENTENCEPIECE.token_to_id("<s>")
    assert b"".join(told(SENTENCEPIECE, ids, "ab c")[1]) == b"ab c"
    assert told(SENTENCEPIECE, [bos, *ids], "ab c")[1][:2] == [b"", b"ab"]
    assert b"".join(told(SENTENCEPIECE, [bos, *ids], "<s> ab c")[1]) == b"<s> ab c"


def test_a_prompt_that_is_not_echoed_has_the_tokens_own_bytes() -> None:
    ids, bos = SENTENCEPIECE.encode("ab c", add_special_tokens=False).ids, SENTENCEPIECE.token_to_id("<s>")
    info, parts = told(SENTENCEPIECE, [bos, *ids], "ab c", echo=False)
    assert parts[:2] == [b"<s>", b" ab"]
    assert info.text == ""


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_a_sentencepiece_vocabulary_inside_a_gguf_file(tmp_path: Path, add_space_prefix: bool) -> None:
    path = write_sentencepiece(tmp_path / "m.gguf", sentencepiece_pieces(), add_space_prefix=add_space_prefix)
    vocabulary = load_vocabulary(ModelSource(path, "gguf", "m"))
    tokenizer = vocabulary.tokenizer
    made = LogprobText(Detokenizer(tokenizer), tokenizer.get_vocab_size(), tokenizer.get_vocab_size())
    ids = tokenizer.encode("the thing 漢 🙂", add_special_tokens=False).ids
    whole = b"".join(made.texts[i] or b"" for i in ids)
    assert whole.decode() == " " * add_space_prefix + "the thing 漢 🙂"
    assert (made.texts[1], made.texts[3 + 0xF0]) == (b"<s>", b"\xf0")
    words = [[tokenizer.id_to_token(i) for i in form] for form in BadWords(vocabulary).ids(["the", "ing"])]
    assert words == [["th", "e"], ["▁the"], ["ing"], ["▁", "ing"]]
