"""What is loaded of a model: vocabularies that are smaller, larger, elsewhere or missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.config import Settings
from shared.errors import StartupError
from shared.logprobs import unpack_text
from shared.model_config import load_model_config, model_digest
from shared.model_source import resolve_model
from tests.tokenizer_service.rig import rig, spec, text_of
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level, save
from tokenizer_service.model import load_model

TOKENIZER = byte_level(LLAMA3_SPECIAL)
SIZE = TOKENIZER.get_vocab_size()


def resized(folder: Path, vocab_size: int) -> Path:
    """The model of ``folder`` with another width of its logits."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    return folder


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    return resized(save(tmp_path / "padded", TOKENIZER), SIZE + 64)


@pytest.fixture
def bare(padded: Path) -> Path:
    """A model without a vocabulary."""
    (padded / "tokenizer.json").unlink()
    (padded / "tokenizer_config.json").unlink()
    return padded


async def test_ids_without_a_token_are_no_text_and_no_error(tmp_path: Path, padded: Path) -> None:
    fox = TOKENIZER.encode("fox").ids
    script = [*fox, SIZE, SIZE + 63, *fox]
    async with rig(tmp_path, lambda request: [script], model=str(padded)) as made:
        (log,) = await made.gateway.ask("r", spec(ids=[SIZE + 63], logprobs=0, echo=True, prompt_logprobs=0))
        assert text_of(log) == "foxfox"
        records = [unpack_text(each).token for each in log.records]
        assert [each.token_id for each in records] == script
        assert [each.token_id for each in records if each.text is None] == [SIZE, SIZE + 63]
        assert log.prompt is not None
        assert (log.prompt.text, log.prompt.first) == ("", b"")
        for refused in (spec("fox", logit_bias=[(SIZE + 63, 100.0)]), spec("fox", allowed_token_ids=[SIZE])):
            (log,) = await made.gateway.ask(f"r{refused.params.logit_bias}", refused)
            assert log.end is not None
            assert log.end.error is not None
            assert "has no token in this vocabulary" in log.end.error.message


def test_a_vocabulary_from_elsewhere(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json.*--tokenizer"):
        load_model(Settings(model=str(bare)))
    other = save(tmp_path / "other", TOKENIZER, chat_template="{{ messages[0].content }}")
    (other / "config.json").unlink()
    model = load_model(Settings(model=str(bare), tokenizer=str(other)))
    source = resolve_model(str(bare))
    assert model.card.digest == model_digest(load_model_config(source), source)
    assert model.card.vocab_size == SIZE + 64
    assert model.vocabulary.chat_templates
    assert model.logprob_text.texts[SIZE - 1 :] == [b"<tool_call>"] + [None] * 64


def test_a_configuration_alone_needs_a_vocabulary(bare: Path, tmp_path: Path) -> None:
    shape = str(resized(bare, 50_000) / "config.json")
    with pytest.raises(StartupError, match="comes without a vocabulary; name one with --tokenizer"):
        load_model(Settings(model=shape))
    model = load_model(Settings(model=shape, tokenizer="demo"))
    assert model.logprob_text.texts.count(None) == 50_000 - 49_152


def test_a_vocabulary_that_is_too_large_is_refused(bare: Path) -> None:
    with pytest.raises(StartupError, match=rf"--tokenizer demo has 49152 token ids, more than the {SIZE + 64} logits"):
        load_model(Settings(model=str(bare), tokenizer="demo"))


def test_a_folder_without_a_vocabulary_is_named(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"the folder {tmp_path} holds no tokenizer\.json"):
        load_model(Settings(model=str(bare), tokenizer=str(tmp_path)))


async def test_a_model_with_more_tokens_than_logits_serves_those_that_it_has(tmp_path: Path) -> None:
    folder = resized(save(tmp_path / "small", TOKENIZER), SIZE - 1)
    async with rig(tmp_path, lambda request: [[70]], model=str(folder)) as made:
        (log,) = await made.gateway.ask("good", spec("fox"))
        assert log.end is not None
        assert log.end.error is None
        (log,) = await made.gateway.ask("bad", spec("fox<tool_call>"))
        assert log.end is not None
        assert log.end.error is not None
        assert f"= {SIZE - 1} is not a token id in 0..{SIZE - 2}" in log.end.error.message
