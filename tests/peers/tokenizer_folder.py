"""The built-in model's tokenizer as a Hugging Face folder, for peers that read nothing else."""

from __future__ import annotations

import json
import pathlib

from shared.model_source import BUILT_IN, resolve_model
from tokenizer_service.gguf_vocabulary import load_gguf_vocabulary


def export_tokenizer(folder: pathlib.Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    vocabulary = load_gguf_vocabulary(resolve_model(BUILT_IN).path)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **vocabulary.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))
