"""A model's vocabulary as a ``tokenizers.Tokenizer``, with its special tokens and chat templates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from shared.errors import StartupError
from shared.model_source import ModelSource

DEFAULT_TEMPLATE = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What it takes to turn text into ids and back."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """``bos_token``, ``eos_token``, ... as chat templates know them."""
    chat_templates: dict[str, str]
    """By name; most models have only ``default``, some also ``tool_use``. Empty: the model has none."""
    bos_id: int | None
    """The id that encoding puts first; None: it puts none there."""


def load_vocabulary(source: ModelSource) -> Vocabulary:
    """Read the vocabulary of ``source``.

    Raises:
        StartupError: a file is missing or damaged, or the kind of vocabulary is not supported.
    """
    if source.kind == "gguf":
        from tokenizer_service.gguf_vocabulary import load_gguf_vocabulary

        return load_gguf_vocabulary(source.path)
    if source.kind == "config":
        raise StartupError(f"{source.path} comes without a vocabulary; name one with --tokenizer")
    return _from_folder(source.path)


def finish(
    tokenizer: Tokenizer, special_tokens: Mapping[str, str | None], chat_templates: dict[str, str]
) -> Vocabulary:
    """Switch off truncation and padding, and find out by trial what encoding puts first."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = {name: token for name, token in special_tokens.items() if token}
    bos = named.get("bos_token")
    expected = None if bos is None else tokenizer.token_to_id(bos)
    first = tokenizer.encode("", add_special_tokens=True).ids[:1]
    return Vocabulary(tokenizer, named, chat_templates, expected if first == [expected] else None)


def add_bos_and_eos(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make encoding put ``bos`` first and ``eos`` last; None: nothing there."""
    ids = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token}
    present = [token for token, token_id in ids.items() if token_id is not None]
    template = " ".join([*([bos] if bos in present else []), "$A", *([eos] if eos in present else [])])
    tokenizer.post_processor = TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[(token, ids[token]) for token in present]
    )


def _from_folder(folder: Path) -> Vocabulary:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartupError(
            f"{folder} holds no tokenizer.json, and other tokenizer files are not supported; name one with --tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise StartupError(f"cannot read {file}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    special = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
    # What is put first and last is the post-processor's word alone, as in transformers 5: add_bos_token is not read.
    return finish(tokenizer, special, _folder_templates(folder, config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, value in config.items():
        if name.endswith("_token") and not name.startswith("add_"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {DEFAULT_TEMPLATE: file.read_text(encoding="utf-8")}
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {DEFAULT_TEMPLATE: template} if template else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}
