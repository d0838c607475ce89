"""Rotary position embedding (Su et al., 2021) and the ways to stretch it.

``ROPE_TYPES`` is the table of scalings; each entry returns the inverse frequencies and the factor on cosine and sine,
with transformers' parameters and formulas (``modeling_rope_utils``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from shared.errors import StartupError
from shared.model_config import ModelConfig


class RotaryTable(Protocol):
    def __call__(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each [tokens, 1, rotary_dim] float32; a token's row is contiguous.

        Args:
            positions: [tokens] int32 or int64.
            lengths: [tokens], the length of the sequence when the token is first computed.
        """


def apply_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` elements of each head, the first half of them against the second.

    ``x * cos + roll(x) * sin``: the sines of the first half are negative, so that a roll is all of rotate_half.

    Args:
        heads: [tokens, heads, head_dim] float32.
    """
    dim = cos.shape[-1]
    rotated = heads if dim == heads.shape[-1] else heads[..., :dim]
    result = torch.mul(rotated, cos).addcmul_(rotated.roll(dim // 2, -1), sin)
    return result if dim == heads.shape[-1] else torch.cat([result, heads[..., dim:]], -1)


def make_rotary(config: ModelConfig, max_model_len: int, device: torch.device) -> RotaryTable:
    """The table for a model.

    Raises:
        StartupError: an unknown rope type, or a scaling that lacks a parameter.
    """
    scaling = config.rope_scaling or {}
    kind = str(scaling.get("rope_type", "default"))
    dim = int(config.head_dim * _partial_factor(config))
    try:
        if kind == "dynamic":
            return DynamicTable(config, dim, float(scaling["factor"]), device)
        if kind not in ROPE_TYPES:
            known = ", ".join(sorted([*ROPE_TYPES, "dynamic"]))
            raise StartupError(f"rope type {kind!r} is not supported; there are {known}")
        inverse, factor = ROPE_TYPES[kind](config, dim, scaling)
    except KeyError as error:
        raise StartupError(f"the rope scaling of type {kind!r} lacks {error.args[0]!r}") from error
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse
    cos, sin = _cos_sin(angles, factor)
    return FixedTable(cos.to(device), sin.to(device))


class FixedTable:
    """Cosines and sines of every position, computed once."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos_sin = torch.stack([cos, sin], 1)

    def __call__(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_sin.index_select(0, positions).unbind(1)
        return cos, sin


class DynamicTable:
    """NTK scaling whose base grows with the sequence once it is longer than the model was trained for.

    A prompt is rotated for its whole length and a generated token for the length that it makes, however the prompt is
    cut into chunks.
    """

    def __init__(self, config: ModelConfig, dim: int, factor: float, device: torch.device) -> None:
        self.theta, self.dim, self.factor = config.rope_theta, dim, factor
        self.original = config.max_position_embeddings
        self.exponents = (torch.arange(0, dim, 2, dtype=torch.float32) / dim).to(device)

    def __call__(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stretch = self.factor * lengths.clamp_min(self.original).float() / self.original - (self.factor - 1)
        base = self.theta * stretch ** (self.dim / (self.dim - 2))
        inverse = 1.0 / base[:, None] ** self.exponents
        return _cos_sin(positions[:, None].float() * inverse, 1.0)


def _cos_sin(angles: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def _partial_factor(config: ModelConfig) -> float:
    for where in (config.rope_scaling, config.raw.get("rope_parameters"), config.raw):
        value = (where or {}).get("partial_rotary_factor")
        if value is not None:
            return float(value)
    return 1.0


Scaling = Mapping[str, Any]


def _inverse(config: ModelConfig, dim: int) -> torch.Tensor:
    return 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _default(config: ModelConfig, dim: int, scaling: Scaling) -> tuple[torch.Tensor, float]:
    return _inverse(config, dim), 1.0


def _linear(config: ModelConfig, dim: int, scaling: Scaling) -> tuple[torch.Tensor, float]:
    return _inverse(config, dim) / scaling["factor"], 1.0


def _factors(config: ModelConfig, dim: int, scaling: Scaling) -> tuple[torch.Tensor, float]:
    return _inverse(config, dim) / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0


def _llama3(config: ModelConfig, dim: int, scaling: Scaling) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones are kept, between them it is blended."""
    inverse = _inverse(config, dim)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, scaled), 1.0


def _yarn(config: ModelConfig, dim: int, scaling: Scaling) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023), with the attention factor of its section 3.4."""
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = scaling.get("factor") or config.max_position_embeddings / original

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    extrapolated = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = config.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
    inverse = 1.0 / (factor * frequencies) * (1 - extrapolated) + 1.0 / frequencies * extrapolated
    return inverse, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Scaling, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


ROPE_TYPES: dict[str, Callable[[ModelConfig, int, Scaling], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
}
