"""How many ids have a token: many models have more logits than tokens, because round numbers compute faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from shared.errors import StartupError
from shared.gguf_header import GgufStrings, read_gguf_header
from shared.model_source import ModelSource

_UNUSED = 5
"""Token type that converters to GGUF give to the ids without a token, with names like ``[PAD151936]``."""


def count_token_ids(source: ModelSource) -> int | None:
    """One more than the largest id that has a token, or None where there is no vocabulary file.

    It may be larger than the width of the logits. Ids below it may lack a token, too.

    Raises:
        StartupError: the vocabulary cannot be read.
    """
    if source.kind == "gguf":
        return _in_gguf(source.path)
    file = source.path / "tokenizer.json"
    return _in_json(file) if source.kind == "folder" and file.is_file() else None


def _in_gguf(path: Path) -> int | None:
    metadata = read_gguf_header(path).metadata
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, GgufStrings):
        return None
    count = len(tokens)
    unused = np.zeros(count, bool) if types is None else np.asarray(types)[:count] == _UNUSED
    while count and unused[count - 1] and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    return count


def _in_json(file: Path) -> int | None:
    try:
        content = orjson.loads(file.read_bytes())
        added = [int(token["id"]) for token in content.get("added_tokens") or ()]
        return 1 + max([_largest_id(content["model"]["vocab"]), *added])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StartupError(f"cannot read the vocabulary in {file}: {error!r}") from error


def _largest_id(vocab: Any) -> int:
    """``vocab`` is an object of tokens and their ids, or (Unigram) an array in the order of ids."""
    return len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
