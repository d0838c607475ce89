"""What data sets need to know of a model's vocabulary."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shared.errors import StartupError
from shared.model_source import BUILT_IN, ModelSource, local_source, resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER_FILES = ["tokenizer*", "special_tokens_map.json", "chat_template*"]


class BenchTokenizer(Protocol):
    """A vocabulary, as data sets use it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which random prompts avoid."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``."""

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, control tokens included."""


class ModelTokenizer:
    """The tokenizer of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class IdsOnly:
    """A vocabulary of which nothing but the size is known: enough for prompts of random ids."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ``StartupError``."""
        raise StartupError("this data set has texts, and without a tokenizer their length in tokens is unknown")

    def decode(self, ids: list[int]) -> str:
        """Raises ``StartupError``."""
        raise StartupError("without a tokenizer there is no text for random ids")


def open_tokenizer(name: str) -> ModelTokenizer:
    """The tokenizer of the model ``name``: ``demo``, a folder, a .gguf file, or a model id of the Hugging Face hub.

    Of a hub model only the tokenizer's files are downloaded. Raises ``StartupError``.
    """
    from tokenizer_service.vocabulary import load_vocabulary

    return ModelTokenizer(load_vocabulary(_source(name)).tokenizer)


def _source(name: str) -> ModelSource:
    path = Path(name).expanduser()
    if path.is_dir():
        return local_source(path, name)
    if name == BUILT_IN or path.exists() or name.startswith((".", "/", "~")):
        return resolve_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return local_source(Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES)), name)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(f"{name!r} is no model here, and the hub does not give its tokenizer: {error}") from error
