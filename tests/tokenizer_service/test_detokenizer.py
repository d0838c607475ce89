from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.model_source import resolve_model
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level, sentencepiece, word_level, word_piece
from tokenizer_service.detokenizer import MAX_HELD, Detokenizer
from tokenizer_service.vocabulary import load_vocabulary

DEMO = load_vocabulary(resolve_model("demo")).tokenizer
BYTES = byte_level(LLAMA3_SPECIAL)
SENTENCEPIECE, WORDS, WORD_PIECE = sentencepiece(), word_level(), word_piece()


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()) -> list[str]:
    decoder = Detokenizer(tokenizer).decoder(prompt, skip)
    return [*(decoder.step(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("tokenizer", [DEMO, BYTES], ids=["demo", "trained"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_joined_pieces_are_what_decode_gives(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    split = st.sampled_from(tokenizer.encode("a🫠b🥹龜 naïve <|eot_id|><|im_end|>\ufffd").ids)
    ids = data.draw(st.lists(split | st.integers(0, 270) | st.integers(0, tokenizer.get_vocab_size() + 5)))
    got = pieces(tokenizer, ids, skip=skip)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["a🫠b🥹龜", "👩‍👩‍👧‍👦 flag 🇩🇪", "日本語 한국어"])
@pytest.mark.parametrize("tokenizer", [DEMO, BYTES], ids=["demo", "trained"])
def test_no_character_is_split_or_held_longer_than_needed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    got = pieces(tokenizer, ids)
    assert "".join(got) == text
    for count in range(len(ids) + 1):
        whole = tokenizer.decode(ids[:count])
        assert "".join(got[:count]) == (whole if text.startswith(whole) else whole.rstrip("\ufffd"))


def test_split_emoji_leaves_with_its_last_byte() -> None:
    ids = DEMO.encode("a🫠b").ids
    assert pieces(DEMO, ids) == ["a", "", "", "🫠", "b", ""]
    assert pieces(DEMO, ids[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_and_ids_beyond_the_vocabulary() -> None:
    end, more = DEMO.token_to_id("<|im_end|>"), [49_152, 2**31 - 1, -1]
    assert pieces(DEMO, [end, *more]) == ["", "", "", "", ""]
    assert pieces(DEMO, [end, *more], skip=False) == ["<|im_end|>", "", "", "", ""]
    kept = BYTES.token_to_id("<tool_call>")
    assert pieces(BYTES, [kept]) == ["<tool_call>", ""]


@pytest.mark.parametrize("tokenizer", [DEMO, BYTES, SENTENCEPIECE, WORDS, WORD_PIECE])
def test_a_decoder_is_a_function_of_all_ids(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    ids = [draw.randrange(min(tokenizer.get_vocab_size(), 300)) for _ in range(60)]
    whole = pieces(tokenizer, ids)[:-1]
    for cut in range(len(ids)):
        decoder = Detokenizer(tokenizer).decoder([], True)
        assert [decoder.step(i) for i in ids[:cut]] + [decoder.step(i) for i in ids[cut:]] == whole


def test_invalid_bytes_are_not_withheld() -> None:
    lead = DEMO.encode("🫠").ids[0]
    got = pieces(DEMO, [lead] * 50)
    assert got[0] == ""
    assert all(got[2:])


def test_sentencepiece_continues_the_prompt() -> None:
    ids = [
        SENTENCEPIECE.token_to_id(piece) for piece in ("▁ab", "c", "▁c", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a")
    ]
    assert pieces(SENTENCEPIECE, ids) == [" ab", "c", " c", "", "", "", "🙂", "a", ""]
    assert SENTENCEPIECE.decode(ids) == "abc c🙂a"
    assert pieces(SENTENCEPIECE, ids[:5])[-2:] == ["", "\ufffd"]


def test_vocabularies_of_words_continue_the_prompt() -> None:
    a, b, stop = (WORDS.token_to_id(word) for word in ("a", "b", "stop"))
    assert pieces(WORDS, [a, b, stop]) == ["a", " b", " stop", ""]
    assert pieces(WORDS, [a, b], prompt=[stop] * 20) == [" a", " b", ""]
    play, ing, dot = (WORD_PIECE.token_to_id(word) for word in ("play", "##ing", "."))
    assert pieces(WORD_PIECE, [ing, play, ing, dot], prompt=[play]) == ["ing", " play", "ing", ".", ""]


def test_a_literal_replacement_character_is_held_for_eight_tokens_at_most() -> None:
    mark = WORDS.token_to_id("\ufffd")
    got = pieces(WORDS, [mark] * (MAX_HELD + 1))
    assert got[: MAX_HELD - 1] == [""] * (MAX_HELD - 1)
    assert got[MAX_HELD - 1] == " ".join(["\ufffd"] * MAX_HELD)
    assert got[-1] == " \ufffd"


@given(ids=st.lists(st.integers(0, 8)), prompt=st.lists(st.integers(0, 6), max_size=12))
def test_words_joined_are_what_decode_adds_to_the_prompt(ids: list[int], prompt: list[int]) -> None:
    before = WORDS.decode(prompt)
    assert before + "".join(pieces(WORDS, ids, prompt=prompt)) == WORDS.decode(prompt + ids)


def test_tokens_without_text_do_not_part_words_from_those_before() -> None:
    a, special = WORDS.token_to_id("a"), WORDS.token_to_id("<s>")
    for nothing in (special, 1000, -1):
        got = pieces(WORDS, [a, *[nothing] * 20, a])
        assert "".join(got) == "a a"
    assert pieces(WORDS, [a], prompt=[a, *[special] * 20])[0] == " a"
