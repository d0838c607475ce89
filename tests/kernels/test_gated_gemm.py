"""Products of gate and up with the activation in the same kernel, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpu_worker.kernels import split_k as split_k_module
from gpu_worker.kernels.activation import silu_mul
from gpu_worker.kernels.gemm import gemm
from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig
from gpu_worker.kernels.split_k import make_arrivals
from gpu_worker.layers import gemm_choice
from gpu_worker.layers.cuda_linear import CudaGatedLinear, CudaLinear
from gpu_worker.layers.gemm_choice import GemmShape
from gpu_worker.layers.mlp import make_gated_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies the bits of bfloat16 matrices as integers."""


def operands(tokens: int, size: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * size + depth)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for shape in ((tokens, depth), (2 * size, depth), (2 * size,))
    )
    return x, weight, bias


def assert_gated(
    choice: GemmChoice, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    arrivals = make_arrivals(DEVICE)
    result = gemm(x, weight, bias, choice, arrivals, out_dtype=out_dtype, gated=True)
    product = x.double() @ weight.double().T
    gate, up = (product if bias is None else product + bias.double()).chunk(2, -1)
    expected = F.silu(gate) * up
    assert result.dtype == out_dtype
    assert result.shape == expected.shape
    precision = torch.finfo(out_dtype).eps
    atol = 1e-5 * x.shape[1] + precision
    torch.testing.assert_close(result.double(), expected, rtol=precision, atol=atol)
    assert not arrivals.any()
    return result


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("size", "depth", "config"),
    [
        (16, 64, GemvConfig(4, 32, 4)),
        (17, 80, GemvConfig(8, 32, 4)),
        (5, 48, GemvConfig(1, 64, 2)),
        (3, 64, GemvConfig(16, 64, 8)),
        (9, 200, GemvConfig(2, 64, 2)),
    ],
)
def test_gemv(tokens: int, size: int, depth: int, config: GemvConfig) -> None:
    x, weight, bias = operands(tokens, size, depth, torch.bfloat16)
    assert_gated(config, x, weight, None, torch.float32)
    assert_gated(config, x, weight, bias, torch.float32)


@pytest.mark.parametrize("tokens", [1, 15, 17])
@pytest.mark.parametrize(
    ("size", "depth", "parts"),
    [
        (32, 128, 1),
        (32, 128, 2),
        (64, 256, 4),
        (33, 160, 3),
        (50, 72, 8),
        (7, 64, 2),
    ],
)
@pytest.mark.parametrize("block_n", [64, 128])
def test_split_k(tokens: int, size: int, depth: int, parts: int, block_n: int) -> None:
    x, weight, bias = operands(tokens, size, depth, HALF)
    config = SplitKConfig(block_n, 16, 32, parts, 4, 3)
    assert_gated(config, x, weight, None, torch.float32)
    assert_gated(config, x, weight, bias, torch.float32)


@pytest.mark.parametrize("config", [GemvConfig(4, 32, 4), SplitKConfig(64, 16, 32, 2, 4, 2)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_the_result_is_rounded_once(config: GemmChoice, dtype: torch.dtype) -> None:
    x, weight, bias = operands(3, 24, 96, dtype)
    exact = assert_gated(config, x, weight, bias, torch.float32)
    assert torch.equal(assert_gated(config, x, weight, bias, dtype), exact.to(dtype))


def test_parts_one_after_another_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(5, 40, 160, HALF)
    config = SplitKConfig(64, 16, 32, 3, 4, 3)
    together = assert_gated(config, x, weight, bias, torch.float32)
    monkeypatch.setattr(split_k_module, "MAX_SPLIT_TILES", 0)
    assert torch.equal(assert_gated(config, x, weight, bias, torch.float32), together)


LAYER_SHAPE = GemmShape(96, 64, HALF, HALF, gated=True)


@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 70])
def test_a_layer_for_any_number_of_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {1: GemvConfig(2, 32, 2), 4: GemvConfig(4, 64, 4), 16: SplitKConfig(64, 32, 32, 2, 4, 3), 64: None}
    monkeypatch.setattr(gemm_choice, "known_choices", lambda name: {LAYER_SHAPE.key: measured})
    x, weight, bias = operands(tokens, 48, 64, HALF)
    layer = CudaGatedLinear(weight, bias)
    gate, up = (x.float() @ weight.float().T + bias.float()).chunk(2, -1)
    result = layer(x)
    assert result.dtype == HALF
    torch.testing.assert_close(result.float(), F.silu(gate) * up, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("tokens", [1, 33])
def test_a_batch_invariant_layer_rounds_before_the_activation(tokens: int) -> None:
    x, weight, bias = operands(tokens, 48, 64, HALF)
    result = CudaGatedLinear(weight, bias, batch_invariant=True)(x)
    assert torch.equal(result, silu_mul(CudaLinear(weight, bias, batch_invariant=True)(x)))
    alone = CudaGatedLinear(weight, bias, batch_invariant=True)(x[-1:])
    assert torch.equal(alone, result[-1:])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_layer_of_a_cpu(batch_invariant: bool) -> None:
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(5, 64)
    gate, up = (x @ weight.T + bias).chunk(2, -1)
    layer = make_gated_linear(weight, bias, batch_invariant=batch_invariant)
    torch.testing.assert_close(layer(x), F.silu(gate) * up, rtol=1e-5, atol=1e-4)
