"""What requests are checked against."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shared.messages import ModelCard

_DEFAULTS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
"""Fields that a model may have a default for, beside ``max_tokens``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against, and what stands for that which it leaves out."""

    names: Sequence[str]
    """Names that the model is served under; the first is the one in answers."""
    card: ModelCard | None
    max_model_len: int | None
    """Of the card, or of the gateway's own setting if that is lower."""
    max_output_tokens: int | None = None
    """What takes the place of a larger ``max_tokens``; None: nothing."""

    @property
    def vocab_size(self) -> int | None:
        return None if self.card is None else self.card.vocab_size

    @property
    def defaults(self) -> dict[str, Any]:
        """The model's own values of sampling fields. They stand for what a request leaves out, and only for that."""
        return {name: _DEFAULTS[name](value) for name, value in self._given if name in _DEFAULTS}

    @property
    def model_has_max_tokens(self) -> bool:
        """Whether the model has a default for ``max_tokens``. A tokenizer applies it: it knows what room there is."""
        return any(name == "max_tokens" for name, _ in self._given)

    @property
    def _given(self) -> Sequence[tuple[str, float]]:
        return [] if self.card is None else self.card.sampling_defaults
