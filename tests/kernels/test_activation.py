"""SiLU·mul against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpu_worker.kernels.activation import silu_mul
from tests.kernels.rounding import relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("size", [96, 1023, 1024, 1025, 3072])
def test_silu_mul(device: torch.device, size: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size + tokens)
    gate_up = (torch.randn(tokens, 2 * size, device=device) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), F.silu(gate) * up, rtol=relative_error(dtype), atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_gates_that_overflow_the_exponential(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert silu_mul(gate_up).tolist() == [[0.0, 0.0, 200.0, 1e4]]
