"""Results that the GPU writes to host memory, bit for bit."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.host_copies import Returns
from gpu_worker.kernels.host_write import BLOCK, write_to_host


@pytest.mark.parametrize("size", [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
def test_any_size_and_alignment(size: int, dtype: torch.dtype, device: torch.device) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (size + 1,), dtype=torch.int64).to(dtype)
    host = torch.zeros(size + 2, dtype=dtype, pin_memory=device.type == "cuda")
    write_to_host(source.to(device)[1:], host[1:-1])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[1:-1], source[1:])
    assert host[0] == host[-1] == 0


def test_many_results_on_their_way(device: torch.device) -> None:
    """Results that nobody waits for keep their memory from those that follow."""
    returns, kept = Returns(device), []
    for number in range(200):
        tensors = [torch.full((4,), number, dtype=torch.int32, device=device), torch.full((2, 3), 0.5, device=device)]
        returned = returns.send(tensors)
        if number % 3 == 0:
            kept.append((number, returned))
    for number, returned in kept:
        tokens, values = returned.wait()
        assert tokens.tolist() == [number] * 4
        assert values.tolist() == [[0.5] * 3] * 2
    assert returns.send([]).wait() == []
