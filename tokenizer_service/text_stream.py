"""The text of one choice: decoding and stop strings, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from shared.sampling import SamplingParams
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.stop_strings import Match, StopStrings


class TextStream:
    """A pure function of the token ids that it is given: the same ids always give the same pieces.

    Args:
        detokenizer: of the model.
        prompt: token ids that the text continues; the last few are enough.
        params: of the request.
        eos_ids: tokens that end a text by themselves.
    """

    __slots__ = ("_count", "_decoder", "_hidden", "_min_tokens", "_step", "_stops", "stop")

    def __init__(
        self, detokenizer: Detokenizer, prompt: Sequence[int], params: SamplingParams, eos_ids: frozenset[int]
    ) -> None:
        self._decoder = detokenizer.decoder(prompt, params.skip_special_tokens)
        self._step = self._decoder.step
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._hidden = _hidden(params, eos_ids)
        self._count = 0
        self.stop: str | None = None
        """The stop string that was found; no more tokens are wanted then."""

    def push(self, token_id: int) -> str:
        """The text that this token releases.

        A token that ends the text has none of its own (unless ``include_stop_str_in_output``).
        """
        count = self._count
        self._count = count + 1
        if token_id in self._hidden and count >= self._min_tokens:
            return ""
        text = self._step(token_id)
        return text if self._stops is None else self._search(text, count >= self._min_tokens)

    def own(self, token_id: int) -> bytes:
        """What ``token_id``, the last that was pushed, adds to the text as long as no stop string cuts it."""
        if token_id in self._hidden and self._count > self._min_tokens:
            return b""
        return self._decoder.own(token_id)

    def finish(self) -> str:
        """What is still held when the choice ends; may find a last stop string."""
        if self.stop is not None:
            return ""
        text = self._decoder.flush()
        if self._stops is None:
            return text
        found = self._search(text, self._count >= self._min_tokens)
        return found if self.stop is not None else found + self._stops.flush()

    def _search(self, text: str, search: bool) -> str:
        assert self._stops is not None
        out = self._stops.push(text, search)
        if isinstance(out, Match):
            self.stop = out.stop
            return out.text
        return out


def _hidden(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a text, as far as they are not shown."""
    if params.include_stop_str_in_output:
        return frozenset()
    ids = frozenset() if params.ignore_eos else eos_ids
    return ids | frozenset(params.stop_token_ids) if params.stop_token_ids else ids
