"""Random weights of a model's shape, from a folder or a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import Harness, make_runner
from tiny_models import TinyModels

from gpu_worker.loading.dummy_weights import DEVIATION, DummyWeights
from shared.errors import StartupError

CPU = torch.device("cpu")
PROMPT = list(range(5, 45))
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def shape_file(tmp_path: Path) -> Path:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SHAPE))
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_a_function_of_seed_and_name(dtype: torch.dtype) -> None:
    def take(seed: int, name: str) -> torch.Tensor:
        weights = DummyWeights(seed)
        weights.place(dtype, CPU)
        weights.take("another.weight", (3,))
        return weights.take(name, (300, 200))

    first = take(1, "a.weight")
    assert first.dtype == dtype
    assert torch.equal(first, take(1, "a.weight"))
    assert not torch.equal(first, take(2, "a.weight"))
    assert not torch.equal(first, take(1, "b.weight"))
    assert abs(first.float().std() - DEVIATION) < 0.02 * DEVIATION
    assert abs(first.float().mean()) < 0.02 * DEVIATION
    assert torch.equal(take(1, "input_layernorm.weight").float(), torch.ones(300, 200))


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_logits_are_finite_and_alive(shape_file: Path, tied: bool) -> None:
    shape_file.write_text(json.dumps({**SHAPE, "tie_word_embeddings": tied}))
    harness = Harness(make_runner(shape_file, load_format="dummy", dtype="bfloat16"))
    harness.generate(PROMPT, 4)
    assert harness.logits is not None
    assert bool(harness.logits.isfinite().all())
    assert 0.05 < harness.logits.std() < 20


def test_only_the_configuration_is_read(tiny_models: TinyModels, tmp_path: Path) -> None:
    config = (tiny_models.folder("llama") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "other.json").write_text(config)
    outputs = [
        Harness(make_runner(model, load_format="dummy")).generate(PROMPT, 12)
        for model in (tmp_path, tmp_path / "other.json", tiny_models.folder("llama"))
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_configuration_has_no_weights_of_its_own(shape_file: Path) -> None:
    with pytest.raises(StartupError, match=r"shape\.json is a configuration without weights; add --load-format dummy"):
        make_runner(shape_file)
