"""The text of log-probability records, and what is told of a prompt: each token's own bytes, whatever surrounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shared.logprobs import to_text_record, token_ids_of
from shared.messages import Int32, PromptInfo
from tokenizer_service.detokenizer import Detokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class PromptText:
    """What a request wants to be told of its prompt."""

    info: PromptInfo
    """All but the records."""
    own: list[bytes | None]
    """[prompt tokens] what each adds to the text; empty: no records are wanted."""
    echo: bool
    """Every choice is told, not only the one with the records."""


class LogprobText:
    """Turns token records into text records (``shared.logprobs``).

    Args:
        vocab_size: width of the logits; records name ids below it.
        num_token_ids: ids from here on have no token.
    """

    def __init__(self, detokenizer: Detokenizer, vocab_size: int, num_token_ids: int) -> None:
        count = min(num_token_ids, vocab_size)
        self.texts = [detokenizer.token_bytes(token_id) for token_id in range(count)] + [None] * (vocab_size - count)
        """[vocab_size] the bytes that each id's token stands for, special or not; None: it has no token."""

    def record(self, record: bytes, own: bytes | None) -> bytes:
        """The text record of ``record``.

        ``own`` is what the token itself adds to the text; None: the bytes that it stands for, as for the others.
        """
        texts = self.texts
        found = [texts[token_id] for token_id in token_ids_of(record)]
        if own is not None and found[0] is not None:
            found[0] = own
        return to_text_record(record, found)

    def prompt(self, ids: Int32, text: str, *, echo: bool, scored: bool) -> PromptText:
        """What can be told of a prompt before it is scored.

        Args:
            ids: [prompt tokens].
            text: that is echoed.
            scored: records are wanted.
        """
        own = self._own(ids.tolist(), text if echo else None) if scored else []
        first = own[0] if own else None
        return PromptText(PromptInfo(ids=ids.tobytes(), text=text if echo else "", first=first or b""), own, echo)

    def scored(self, prompt: PromptText, records: Sequence[bytes]) -> PromptInfo:
        """The whole answer: with the text records of the engine's ``records`` of all prompt tokens but the first."""
        texts = [self.record(record, own) for record, own in zip(records, prompt.own[1:], strict=True)]
        return dataclasses.replace(prompt.info, records=texts)

    def _own(self, ids: Sequence[int], text: str | None) -> list[bytes | None]:
        """The bytes of each id, which join to ``text``: a BOS or a space that encoding has put first is left out."""
        own = [self.texts[token_id] for token_id in ids]
        if text is None:
            return own
        whole = text.encode()
        for begin in range(min(2, len(own))):
            joined = b"".join(each or b"" for each in own[begin:])
            if joined in (whole, b" " + whole):
                shown = own[begin] or b""
                return [b""] * begin + [shown[len(joined) - len(whole) :]] + own[begin + 1 :]
        return own
