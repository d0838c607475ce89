"""How many ids have a token, by the kind of vocabulary file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models

from shared.errors import StartupError
from shared.model_source import ModelSource, resolve_model
from shared.token_ids import count_token_ids

NORMAL, CONTROL, UNUSED = 1, 3, 5


def of_folder(folder: Path) -> int | None:
    return count_token_ids(ModelSource(folder, "folder", "m"))


@pytest.mark.parametrize(
    "model",
    [
        models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]),
        models.WordLevel({"a": 0, "b": 2}, unk_token="a"),
        models.WordPiece({"[UNK]": 0, "a": 2}, unk_token="[UNK]"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0),
    ],
)
def test_a_folder(tmp_path: Path, model: Any) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert of_folder(tmp_path) == 3
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    assert of_folder(tmp_path) == max(ids) + 1


def test_without_a_vocabulary_nothing_is_known(tmp_path: Path) -> None:
    assert of_folder(tmp_path) is None
    assert count_token_ids(ModelSource(tmp_path / "shape.json", "config", "m")) is None
    assert count_token_ids(gguf_file(tmp_path, None, None)) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "x"}}}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        of_folder(tmp_path)


def test_an_empty_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    assert of_folder(tmp_path) == 0


def gguf_file(folder: Path, names: list[str] | None, types: list[int] | None) -> ModelSource:
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if names is not None:
        writer.add_token_list(names)
    if types is not None:
        writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path, "gguf", "m")


@pytest.mark.parametrize(
    ("names", "types", "count"),
    [
        (["a", "b"], None, 2),
        (["a", "<s>"], [NORMAL, CONTROL], 2),
        (["a", "b", "[PAD2]", "[PAD3]"], [NORMAL, NORMAL, UNUSED, UNUSED], 2),
        (["a", "[PAD1]", "<s>", "[PAD3]"], [NORMAL, UNUSED, CONTROL, UNUSED], 3),
        (["a", "unused but named"], [NORMAL, UNUSED], 2),
        (["[PAD0]"], [UNUSED], 0),
    ],
)
def test_padding_of_a_gguf_file(tmp_path: Path, names: list[str], types: list[int] | None, count: int) -> None:
    assert count_token_ids(gguf_file(tmp_path, names, types)) == count


def test_the_built_in_model() -> None:
    assert count_token_ids(resolve_model("demo")) == 49_152
