"""Both forms of a word are found, whatever their lengths; a word without tokens is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared.errors import ErrorCode, RequestError
from shared.model_source import resolve_model
from tests.tokenizer_service.rig import Rig, rig, spec
from tests.tokenizer_service.vocabularies import (
    LLAMA3_SPECIAL,
    byte_level,
    save,
    sentencepiece,
    word_level,
    word_piece,
)
from tokenizer_service.bad_words import BadWords
from tokenizer_service.vocabulary import finish, load_vocabulary

DEMO = load_vocabulary(resolve_model("demo"))


def forms(tokenizer: Tokenizer, *words: str) -> list[list[str]]:
    """The tokens of all sequences."""
    found = BadWords(finish(tokenizer, {}, {})).ids(words)
    return [[tokenizer.id_to_token(token_id) for token_id in ids] for ids in found]


def test_forms_of_different_lengths() -> None:
    bare = DEMO.tokenizer.encode("exaggerated", add_special_tokens=False).ids
    spaced = DEMO.tokenizer.encode(" exaggerated", add_special_tokens=False).ids
    assert len(bare) != len(spaced)
    for word in ("exaggerated", " exaggerated"):
        assert BadWords(DEMO).ids([word]) == [bare, spaced]


def test_the_same_word_twice_is_one() -> None:
    found = BadWords(DEMO).ids(["fox", " fox", "dog", "fox"])
    assert len(found) == 4


def test_a_byte_level_vocabulary() -> None:
    tokenizer = byte_level(LLAMA3_SPECIAL)
    assert forms(tokenizer, "the") == [["the"], ["Ġ", "the"]]
    # The bytes of characters that are not in the vocabulary are not unknown.
    assert len(forms(tokenizer, "龜")[0]) == 3


def test_a_vocabulary_with_a_space_before_every_text_has_the_inner_form_too() -> None:
    assert forms(sentencepiece(), "ab") == [["ab"], ["▁ab"]]
    assert forms(sentencepiece(), " c", "é") == [["c"], ["▁c"], ["é"], ["▁", "é"]]


def test_vocabularies_of_words_have_one_form() -> None:
    assert forms(word_level(), "stop") == [["stop"]]
    assert forms(word_piece(), "playing") == [["play", "##ing"]]


@pytest.mark.parametrize("tokenizer", [word_level(), word_piece()])
def test_a_word_that_is_unknown_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"bad_words\[1\] = 'zebra' has no tokens") as caught:
        forms(tokenizer, "the" if tokenizer.token_to_id("the") else "stop", "zebra")
    assert caught.value.param == "bad_words"


def test_a_word_of_no_tokens_is_refused() -> None:
    tokenizer = word_piece()
    with pytest.raises(RequestError, match="has no tokens"):
        forms(tokenizer, "\u200b")


def test_a_very_long_word_is_refused() -> None:
    with pytest.raises(RequestError, match=r"bad_words\[0\] is \d+ tokens long; at most 64"):
        BadWords(DEMO).ids(["qzxj" * 100])


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, lambda request: [[5]] * request.n, model="demo") as made:
        yield made


async def test_engines_get_ids_for_every_choice(demo: Rig) -> None:
    await demo.gateway.ask("r", spec("x", bad_words=["exaggerated"], n=2))
    params = demo.engine.begun[0].params
    assert params.bad_words == []
    assert params.bad_words_token_ids == BadWords(DEMO).ids(["exaggerated"])
    assert params.n == 2


async def test_a_refusal_names_the_field_and_others_go_on(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", word_level())
    async with rig(tmp_path, lambda request: [[4]], model=str(folder)) as made:
        refused, good = await asyncio.gather(
            made.gateway.ask("bad", spec("a b", bad_words=["stop", "zebra"])),
            made.gateway.ask("good", spec("a b", bad_words=["stop"])),
        )
    assert refused[0].end is not None
    assert refused[0].end.error is not None
    assert (refused[0].end.error.code, refused[0].end.error.param) == (ErrorCode.INVALID_REQUEST, "bad_words")
    assert good[0].ids.tolist() == [4]
