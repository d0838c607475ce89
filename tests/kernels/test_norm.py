"""RMSNorm with and without an addition, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.norm import add_rms_norm, rms_norm
from tests.kernels.rounding import relative_error

EPS = 1e-6


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = x.double()
    return exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * weight.double()


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=relative_error(actual.dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("size", [64, 576, 1024, 4096, 16384])
def test_norm_of_a_sum(device: torch.device, size: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size + rows)
    hidden = torch.randn(rows, size, device=device) * 3
    delta = torch.randn(rows, size, device=device).to(dtype)
    weight = torch.rand(size, device=device) + 0.5
    total = hidden + delta
    close(rms_norm(hidden, weight, EPS, dtype), expected(hidden, weight))
    normed = add_rms_norm(hidden, delta, weight, EPS, dtype)
    assert torch.equal(hidden, total)
    assert normed.dtype == dtype
    close(normed, expected(total, weight))


def test_a_row_is_the_same_bits_among_any_number_of_rows(device: torch.device) -> None:
    x, weight = torch.randn(9, 96, device=device), torch.rand(96, device=device)
    together = rms_norm(x, weight, EPS, torch.float32)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, EPS, torch.float32)[0], together[i]) for i in range(9))


def test_a_row_of_zeros(device: torch.device) -> None:
    normed = rms_norm(torch.zeros(2, 128, device=device), torch.ones(128, device=device), EPS, torch.float32)
    assert not normed.any()
