"""All that a tokenizer reads of a model, loaded once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shared.config import Settings
from shared.errors import StartupError
from shared.messages import ModelCard
from shared.model_config import load_model_config, model_digest, resolve_max_model_len
from shared.model_source import resolve_model
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.vocabulary import DEFAULT_TEMPLATE, Vocabulary, load_vocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    vocabulary: Vocabulary
    detokenizer: Detokenizer
    eos_ids: tuple[int, ...]
    card: ModelCard


def load_model(settings: Settings) -> Model:
    """Read configuration and vocabulary; takes a fraction of a second, and longer where a hub model is fetched.

    Raises:
        StartupError: says what is missing or wrong.
    """
    source = resolve_model(settings.model, settings.revision)
    config = load_model_config(source)
    vocabulary = load_vocabulary(source)
    if settings.chat_template is not None:
        template = _read_template(settings.chat_template)
        vocabulary = dataclasses.replace(vocabulary, chat_templates={DEFAULT_TEMPLATE: template})
    card = ModelCard(
        model=str(source.path),
        digest=model_digest(config, source),
        vocab_size=config.vocab_size,
        max_model_len=resolve_max_model_len(config, settings.max_model_len),
    )
    return Model(vocabulary, Detokenizer(vocabulary.tokenizer), config.eos_token_ids, card)


def _read_template(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {file}: {error}") from error
