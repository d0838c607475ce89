"""Token ids to text, a token at a time: never half a character, nothing lost, nothing withheld without bound.

A vocabulary of bytes (byte-level BPE, or SentencePiece with byte fallback) is decoded as a stream of UTF-8: each id
stands for its bytes, at most three bytes wait for the rest of their character, and invalid bytes become U+FFFD at once.
Other vocabularies are decoded by comparing ``decode`` of a few tokens with and without the new ones.

The text is what the ids add to the prompt: with a SentencePiece vocabulary the space before the first word stays.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

MAX_HELD = 8
"""Tokens without text after which a decoder of the comparing kind gives what ``decode`` would."""

_CONTEXT = 8
"""Tokens of context for decoders whose text of a token depends on the ones before."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Decoder(Protocol):
    """The decoder of one choice: a pure function of all ids that it was given."""

    def step(self, token_id: int) -> str:
        """The text that this token releases; empty while a character is incomplete."""

    def own(self, token_id: int) -> bytes:
        """What ``token_id``, the last that was given to ``step``, adds to the text, incomplete characters included."""

    def flush(self) -> str:
        """What is still held at the end, as ``decode`` would give it."""


class Detokenizer:
    """Makes decoders for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kind = _kind_of_bytes(tokenizer)
        self._tables = None if kind is None else {skip: TokenTable(tokenizer, kind, skip) for skip in (True, False)}
        added = {} if kind else tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def decoder(self, prompt: Sequence[int], skip_special_tokens: bool) -> Decoder:
        """A new decoder for text that follows ``prompt`` (its last few ids are enough)."""
        if self._tables is not None:
            return _ByteDecoder(self._tables[skip_special_tokens])
        return _ComparingDecoder(self._tokenizer, prompt, self._special if skip_special_tokens else frozenset())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ``ids`` on their own."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token stands for, special or not, with whatever it puts between itself and a token before it.

        None: there is no such token.
        """
        if self._tokenizer.id_to_token(token_id) is None:
            return None
        if self._tables is not None:
            return _as_bytes(self._tables[False][token_id])
        if token_id in self._added:
            return self._added[token_id].encode()
        before, both = self.decode([token_id]), self.decode([token_id, token_id])
        return both[len(before) :].encode()


class TokenTable(dict[int, str | bytes]):
    """What each token stands for: text where its bytes are whole characters, else its bytes.

    It is filled as tokens are asked for; an id beyond the vocabulary is an empty text.
    """

    def __init__(self, tokenizer: Tokenizer, kind: str, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._bytes_of = _byte_level if kind == "ByteLevel" else _byte_fallback
        added = tokenizer.get_added_tokens_decoder() if skip_special_tokens else {}
        self.update({token_id: "" for token_id, token in added.items() if token.special})

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return ""
        raw = self._bytes_of(token)
        try:
            self[token_id] = raw.decode()
        except UnicodeDecodeError:
            self[token_id] = raw
        return self[token_id]


class _ByteDecoder:
    __slots__ = ("_begun", "_table", "_utf8")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = _utf8_decoder("replace")
        self._begun = False
        """A character waits for its last bytes."""

    def step(self, token_id: int) -> str:
        found = self._table[token_id]
        if found.__class__ is str and not self._begun:
            return found
        return self._decode(found)

    def own(self, token_id: int) -> bytes:
        return _as_bytes(self._table[token_id])

    def flush(self) -> str:
        self._begun = False
        return self._utf8.decode(b"", True)

    def _decode(self, found: str | bytes) -> str:
        text = self._utf8.decode(_as_bytes(found))
        self._begun = bool(self._utf8.getstate()[0])
        return text


class _ComparingDecoder:
    __slots__ = ("_before", "_context", "_held", "_released", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._held: list[int] = []
        self._released = ""
        self._settle([int(i) for i in prompt if self._has_text(i)][-_CONTEXT:])

    def step(self, token_id: int) -> str:
        self._released = ""
        if not self._has_text(token_id):
            return ""
        self._held.append(token_id)
        text = self._text(self._context + self._held)
        complete = len(text) > len(self._before) and not text.endswith("�")
        if complete or len(self._held) >= MAX_HELD:
            self._released = self._release(text)
        return self._released

    def own(self, token_id: int) -> bytes:
        return self._released.encode()

    def flush(self) -> str:
        return self._release(self._text(self._context + self._held)) if self._held else ""

    def _release(self, text: str) -> str:
        new = text[len(self._before) :]
        self._settle((self._context + self._held)[-_CONTEXT:])
        return new

    def _settle(self, context: list[int]) -> None:
        self._context, self._held = context, []
        self._before = self._text(context)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _has_text(self, token_id: int) -> bool:
        """Others would only push the text before them out of the context."""
        return token_id >= 0 and token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None


def _as_bytes(found: str | bytes) -> bytes:
    return found.encode() if isinstance(found, str) else found


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's spelling of bytes as printable characters: code point of the character → byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{256 + index: byte for index, byte in enumerate(others)}}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[ord(character)] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("▁", " ").encode()


def _kind_of_bytes(tokenizer: Tokenizer) -> str | None:
    """``ByteLevel`` or ``ByteFallback`` if tokens stand for bytes whatever surrounds them, else None."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps = decoder.get("decoders") or [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "ByteLevel"
    replaces = [(step.get("pattern"), step.get("content")) for step in steps if step.get("type") == "Replace"]
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "ByteFallback" if replaces == [({"String": "▁"}, " ")] else None
    return None
