"""Words that must not appear, as sequences of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.errors import RequestError
from shared.sampling import MAX_BAD_WORD_TOKENS
from tokenizer_service.vocabulary import Vocabulary

_BEFORE = "\n"
"""Text that no token joins with a word behind it."""


class BadWords:
    """Finds the ids of words as they would be generated, at the start of a word and inside of one.

    A vocabulary has most words twice, with a space before them and without, and these often differ in length: both
    forms are given, the space of the word itself aside (as in vLLM).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.tokenizer
        unknown = getattr(self._tokenizer.model, "unk_token", None) or vocabulary.special_tokens.get("unk_token")
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)

    def ids(self, words: Sequence[str]) -> list[list[int]]:
        """The sequences of all words, each once. It takes a while for long words.

        Raises:
            RequestError: a word has no tokens, or too many.
        """
        found: list[list[int]] = []
        for index, word in enumerate(words):
            forms = [form for form in self._forms(word.lstrip()) if not self._is_unknown(form)]
            if not forms:
                raise RequestError(f"bad_words[{index}] = {word!r} has no tokens in this vocabulary", "bad_words")
            longest = max(map(len, forms))
            if longest > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words[{index}] is {longest} tokens long; at most {MAX_BAD_WORD_TOKENS} are allowed",
                    "bad_words",
                )
            found += [form for form in _distinct(forms) if form not in found]
        return found

    def _forms(self, word: str) -> list[list[int]]:
        texts = [_BEFORE, *(_BEFORE + each for each in (word, " " + word)), word, " " + word]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        before, *continued, bare, spaced = [encoding.ids for encoding in encoded]
        # A vocabulary that puts a space before every text has the form without one only behind other text.
        if all(ids[: len(before)] == before for ids in continued):
            return [ids[len(before) :] for ids in continued]
        return [bare, spaced]

    def _is_unknown(self, ids: Iterable[int]) -> bool:
        """Whether ``ids`` hold nothing but the unknown token; true if there are none."""
        return all(token_id == self._unknown for token_id in ids)


def _distinct(forms: Iterable[list[int]]) -> list[list[int]]:
    return [list(form) for form in dict.fromkeys(map(tuple, forms))]
