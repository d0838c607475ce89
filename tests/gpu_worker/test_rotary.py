"""Rotary embedding: partial rotation, and the frequencies of GGUF files. The scalings are tested with whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_worker.layers.rotary import apply_rotary, make_rotary
from shared.model_config import ModelConfig


def config_of(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "checkpoint_dtype": "float32",
        "raw": {},
    }
    return ModelConfig(**{**fields, **changes})


def rotated(config: ModelConfig, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    table = make_rotary(config, 256, torch.device("cpu"))
    return apply_rotary(heads, *table(positions, positions + 1))


def by_formula(heads: torch.Tensor, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + half) turned by position * inverse[i], in float64."""
    half = len(inverse)
    x, y, rest = heads.double().split([half, half, heads.shape[-1] - 2 * half], -1)
    angle = (positions[:, None] * inverse.double())[:, None]
    return torch.cat([x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin(), rest], -1)


def inverse_of(dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, dim, 2).double() / dim)


HEADS = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.tensor([0, 1, 17, 100, 255])


@pytest.mark.parametrize(
    "changes",
    [
        {"raw": {"partial_rotary_factor": 0.5}},
        {"raw": {"rope_parameters": {"partial_rotary_factor": 0.5}}},
        {"rope_scaling": {"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotation(changes: dict[str, Any]) -> None:
    result = rotated(config_of(**changes), HEADS, POSITIONS)
    assert torch.equal(result[..., 8:], HEADS[..., 8:])
    assert torch.allclose(result.double(), by_formula(HEADS, POSITIONS, inverse_of(8)), atol=1e-4)


def test_whole_rotation() -> None:
    result = rotated(config_of(), HEADS, POSITIONS)
    assert torch.allclose(result.double(), by_formula(HEADS, POSITIONS, inverse_of(16)), atol=1e-4)


def test_factors_of_a_gguf_file_divide_the_frequencies() -> None:
    factors = [1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    scaling = {"rope_type": "factors", "factors": factors}
    result = rotated(config_of(rope_scaling=scaling), HEADS, POSITIONS)
    expected = by_formula(HEADS, POSITIONS, inverse_of(16) / torch.tensor(factors))
    assert torch.allclose(result.double(), expected, atol=1e-4)
