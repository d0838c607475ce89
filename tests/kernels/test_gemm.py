"""Products of few tokens against float64 products of the same numbers."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels import split_k as split_k_module
from gpu_worker.kernels.gemm_config import GemvConfig, SplitKConfig
from gpu_worker.kernels.gemv import gemv
from gpu_worker.kernels.split_k import make_arrivals, split_k

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies the bits of bfloat16 matrices as integers."""


def operands(tokens: int, rows: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * rows + depth)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for shape in ((tokens, depth), (rows, depth), (rows,))
    )
    return x, weight, bias


def assert_product(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> None:
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    assert result.dtype == dtype
    assert result.shape == expected.shape
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=precision, atol=1e-5 * x.shape[1] ** 0.5 + precision)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "depth", "config"),
    [
        (16, 64, GemvConfig(4, 32, 4)),
        (17, 80, GemvConfig(8, 32, 4)),
        (5, 48, GemvConfig(1, 64, 2)),
        (3, 64, GemvConfig(16, 64, 8)),
    ],
)
def test_gemv(tokens: int, rows: int, depth: int, config: GemvConfig) -> None:
    x, weight, bias = operands(tokens, rows, depth, torch.bfloat16)
    assert_product(gemv(x, weight, None, config), x, weight, None, torch.bfloat16)
    result = gemv(x, weight, bias, config, out_dtype=torch.float32)
    assert_product(result, x, weight, bias, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gemv_of_other_dtypes(dtype: torch.dtype) -> None:
    x, weight, bias = operands(2, 16, 64, dtype)
    assert_product(gemv(x, weight, bias, GemvConfig(4, 32, 4)), x, weight, bias, dtype)


def test_gemv_refuses_more_tokens() -> None:
    x, weight, _ = operands(5, 8, 32, torch.float32)
    with pytest.raises(ValueError, match="1 to 4 tokens, got 5"):
        gemv(x, weight, None, GemvConfig(4, 32, 4))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
@pytest.mark.parametrize(
    ("rows", "depth", "parts"),
    [
        (64, 128, 1),
        (64, 128, 2),
        (128, 256, 4),
        (65, 160, 3),
        (100, 72, 8),
    ],
)
def test_split_k(tokens: int, rows: int, depth: int, parts: int) -> None:
    x, weight, bias = operands(tokens, rows, depth, HALF)
    arrivals = make_arrivals(DEVICE)
    config = SplitKConfig(64, 16, 32, parts, 4, 3)
    assert_product(split_k(x, weight, None, config, arrivals), x, weight, None, HALF)
    result = split_k(x, weight, bias, config, arrivals, out_dtype=torch.float32)
    assert_product(result, x, weight, bias, torch.float32)
    assert not arrivals.any()


def test_split_k_of_float32() -> None:
    x, weight, bias = operands(3, 64, 96, torch.float32)
    result = split_k(x, weight, bias, SplitKConfig(64, 16, 32, 2, 4, 2), make_arrivals(DEVICE))
    assert_product(result, x, weight, bias, torch.float32)


def test_rows_of_a_larger_matrix() -> None:
    """Activations may be columns of a wider tensor, as the parts of a fused projection are."""
    wide, weight, _ = operands(4, 64, 128, HALF)
    x, weight = wide[:, 64:], weight[:, :64].contiguous()
    assert_product(gemv(x, weight, None, GemvConfig(4, 64, 4)), x, weight, None, HALF)
    result = split_k(x, weight, None, SplitKConfig(64, 16, 32, 2, 4, 3), make_arrivals(DEVICE))
    assert_product(result, x, weight, None, HALF)


@pytest.mark.parametrize("tokens", [2, 16, 40])
def test_a_token_has_the_same_bits_among_any_others(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(tokens, 128, 160, HALF)
    arrivals = make_arrivals(DEVICE)
    config = SplitKConfig(64, 16, 32, 3, 4, 3)
    together = split_k(x, weight, bias, config, arrivals)
    last_alone = split_k(x[-1:], weight, bias, config, arrivals)
    assert torch.equal(last_alone, together[-1:])
    monkeypatch.setattr(split_k_module, "MAX_SPLIT_TILES", 0)
    assert torch.equal(split_k(x, weight, bias, config, arrivals), together)


def test_weights_beyond_int32() -> None:
    """Offsets of a vocabulary of 256 k rows by 8,192 pass two billion; here the rows are few and far apart."""
    if not torch.cuda.is_available():
        pytest.skip("takes 4 GiB of a GPU")
    weight = torch.zeros(262_208, 8192, dtype=torch.bfloat16, device=DEVICE)
    weight[-1] = 1
    x = torch.ones(2, 8192, dtype=torch.bfloat16, device=DEVICE)
    for result in (
        gemv(x, weight, None, GemvConfig(4, 512, 4), out_dtype=torch.float32),
        split_k(x, weight, None, SplitKConfig(64, 16, 128, 1, 4, 4), make_arrivals(DEVICE), out_dtype=torch.float32),
    ):
        assert result[:, -1].tolist() == [8192, 8192]
        assert not result[:, :-1].any()
