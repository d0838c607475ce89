"""Sampling defaults that come with a model: read, checked, said at start, switched off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from shared.config import Settings
from shared.errors import StartupError
from shared.model_source import ModelSource, resolve_model
from tests.tokenizer_service.rig import rig, spec
from tests.tokenizer_service.vocabularies import byte_level, save
from tokenizer_service.generation_config import load_sampling_defaults

OWN = {"temperature": 0.7, "top_k": 0, "repetition_penalty": 1.1, "eos_token_id": [1, 2], "do_sample": True}
READ = {"temperature": 0.7, "top_k": 0, "repetition_penalty": 1.1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save(tmp_path / "model", byte_level([]))
    (folder / "generation_config.json").write_text(json.dumps(OWN))
    return folder


def defaults(model: Path, **settings: Any) -> dict[str, float]:
    made = Settings(model=str(model), **settings)
    return load_sampling_defaults(made, resolve_model(made.model)).values


def test_the_models_own_file(model: Path) -> None:
    found = load_sampling_defaults(Settings(model=str(model)), resolve_model(str(model)))
    assert found.values == READ
    assert found.origin.endswith("model/generation_config.json")
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 300, "top_k": 50.0, "top_p": None}))
    assert defaults(model) == {"top_k": 50, "max_tokens": 300}
    (model / "generation_config.json").unlink()
    assert defaults(model) == {}


@pytest.mark.parametrize("switch", ["vllm", "none"])
def test_the_switch(model: Path, switch: str) -> None:
    (model / "generation_config.json").write_text("not even JSON")
    assert defaults(model, generation_config=switch) == {}


def test_another_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1}')
    assert defaults(model, generation_config=str(tmp_path)) == {"min_p": 0.1}
    (tmp_path / "mine.json").write_text('{"min_p": 0.2}')
    assert defaults(model, generation_config=str(tmp_path / "mine.json")) == {"min_p": 0.2}
    with pytest.raises(StartupError, match="--generation-config absent: there is no file absent"):
        defaults(model, generation_config="absent")


def test_overrides_win_and_null_takes_away(model: Path) -> None:
    override = '{"temperature": 0.2, "top_p": 0.9, "repetition_penalty": null}'
    assert defaults(model, override_generation_config=override) == {"temperature": 0.2, "top_k": 0, "top_p": 0.9}
    alone = Settings(model=str(model), generation_config="vllm", override_generation_config=override)
    found = load_sampling_defaults(alone, resolve_model(alone.model))
    assert found == ({"temperature": 0.2, "top_p": 0.9}, "--override-generation-config")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("{", "--override-generation-config is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"temprature": 1}', "unknown key temprature; did you mean temperature?"),
        ('{"zzz": 1}', "unknown key zzz; known are temperature"),
        ('{"top_p": 2}', r"--override-generation-config: top_p: top_p must be in \[0, 1\], got 2"),
    ],
)
def test_overrides_that_make_no_sense(model: Path, override: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        defaults(model, override_generation_config=override)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"temperature": True},
    ],
)
def test_a_value_out_of_range_names_file_and_field(model: Path, content: dict[str, Any]) -> None:
    (model / "generation_config.json").write_text(json.dumps(content))
    (key,) = content
    with pytest.raises(StartupError, match=rf"generation_config\.json: {key}: .*--generation-config vllm"):
        defaults(model)
    assert defaults(model, generation_config="vllm") == {}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file(model: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"generation_config\.json"):
        defaults(model)


def test_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = ModelSource(tmp_path / "m.gguf", "gguf", "m")
    assert load_sampling_defaults(Settings(), source).values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert load_sampling_defaults(Settings(generation_config="vllm"), source).values == {}
    assert load_sampling_defaults(Settings(), resolve_model("demo")).values == {}


async def test_the_card_tells_gateways_and_the_log_tells_people(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = '{"max_new_tokens": 7}'
    async with rig(tmp_path, lambda request: [[70]], model=str(model), override_generation_config=override) as made:
        hello = made.gateway.hello
        assert hello is not None
        assert hello.card is not None
        assert dict(hello.card.sampling_defaults) == READ | {"max_tokens": 7}
        await made.gateway.ask("short", spec("fox", max_tokens=None))
        await made.gateway.ask("long", spec("fox", max_tokens=20))
        assert [each.params.max_tokens for each in made.engine.begun] == [7, 20]
        # Parameters that a client may leave out are the gateway's to fill in.
        assert made.engine.begun[0].params.temperature == 1.0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "default sampling parameters" in each]
    for word in ("--generation-config vllm", "temperature=0.7", "top_k=0", "repetition_penalty=1.1", "max_tokens=7"):
        assert word in line
