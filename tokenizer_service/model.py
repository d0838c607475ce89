"""All that a tokenizer reads of a model, loaded once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shared.config import Settings
from shared.errors import StartupError
from shared.messages import ModelCard
from shared.model_config import ModelConfig, load_model_config, model_digest, resolve_max_model_len
from shared.model_source import ModelSource, resolve_model
from shared.token_ids import count_token_ids
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.generation_config import SamplingDefaults, load_sampling_defaults
from tokenizer_service.logprob_text import LogprobText
from tokenizer_service.vocabulary import DEFAULT_TEMPLATE, Vocabulary, load_vocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    vocabulary: Vocabulary
    detokenizer: Detokenizer
    logprob_text: LogprobText
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    card: ModelCard


def load_model(settings: Settings) -> Model:
    """Read configuration and vocabulary; takes a fraction of a second, and longer where a hub model is fetched.

    Raises:
        StartupError: says what is missing or wrong.
    """
    source = resolve_model(settings.model, settings.revision)
    config = load_model_config(source)
    vocabulary, num_token_ids = _load_vocabulary(settings, source, config)
    if settings.chat_template is not None:
        template = _read_template(settings.chat_template)
        vocabulary = dataclasses.replace(vocabulary, chat_templates={DEFAULT_TEMPLATE: template})
    detokenizer = Detokenizer(vocabulary.tokenizer)
    defaults = load_sampling_defaults(settings, source)
    card = ModelCard(
        model=str(source.path),
        digest=model_digest(config, source),
        vocab_size=config.vocab_size,
        max_model_len=resolve_max_model_len(config, settings.max_model_len),
        sampling_defaults=list(defaults.values.items()),
    )
    logprob_text = LogprobText(detokenizer, config.vocab_size, num_token_ids)
    return Model(vocabulary, detokenizer, logprob_text, config.eos_token_ids, defaults, card)


def _load_vocabulary(settings: Settings, source: ModelSource, config: ModelConfig) -> tuple[Vocabulary, int]:
    """The vocabulary, and how many ids of it have a token."""
    if settings.tokenizer is None:
        vocabulary = load_vocabulary(source)
        return vocabulary, count_token_ids(source) or config.vocab_size
    source = resolve_model(settings.tokenizer, vocabulary_only=True)
    vocabulary = load_vocabulary(source)
    count = count_token_ids(source) or 0
    if count > config.vocab_size:
        raise StartupError(
            f"--tokenizer {settings.tokenizer} has {count} token ids, more than the {config.vocab_size} logits of the "
            f"model {settings.model}"
        )
    return vocabulary, count


def _read_template(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {file}: {error}") from error
