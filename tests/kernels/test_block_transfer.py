"""KV blocks between the device's pool and the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.kernels.block_transfer import transfer_blocks

LAYERS, BLOCKS, HOST_BLOCKS = 3, 7, 5
PAIRS = [(1, 4), (6, 0), (3, 2)]
"""Block of the device, block of the host."""


def made_of_bytes(seed: int, *shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Any bits there are, those of NaNs included."""
    count = int(np.prod(shape)) * dtype.itemsize
    made = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    there = made.view(dtype).view(shape)
    return there.to(device) if device != "host" else pinned(there)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


@pytest.mark.parametrize("to_host", [True, False], ids=["to the host", "to the device"])
@pytest.mark.parametrize("programs", [1, 5, 1000])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 2, 16, 16), torch.float32),
        ((2, 2, 16, 80), torch.bfloat16),
        ((2, 1, 16, 64), torch.float8_e4m3fn),
        ((2, 8, 16, 128), torch.bfloat16),
        ((2, 4, 32, 48), torch.float16),
        ((2, 1, 1, 6), torch.bfloat16),
    ],
    ids=str,
)
def test_as_torch_copies(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, programs: int, to_host: bool
) -> None:
    cache = made_of_bytes(1, LAYERS, BLOCKS, *shape, dtype=dtype, device=device)
    host = made_of_bytes(2, HOST_BLOCKS, LAYERS, *shape, dtype=dtype, device="host")
    wanted_cache, wanted_host = cache.clone(), host.clone()
    for block, host_block in PAIRS:
        if to_host:
            wanted_host[host_block] = cache[:, block].cpu()
        else:
            wanted_cache[:, block] = host[host_block].to(device)
    pairs = torch.tensor(PAIRS, dtype=torch.int32, device=device)
    transfer_blocks(cache, host, pairs, to_host=to_host, programs=programs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert torch.equal(bits(cache), bits(wanted_cache))
    assert torch.equal(bits(host), bits(wanted_host))


def test_no_pairs(device: torch.device) -> None:
    cache = made_of_bytes(1, LAYERS, BLOCKS, 2, 1, 16, 16, dtype=torch.float16, device=device)
    host = made_of_bytes(2, HOST_BLOCKS, LAYERS, 2, 1, 16, 16, dtype=torch.float16, device="host")
    before = cache.clone(), host.clone()
    for to_host in (True, False):
        transfer_blocks(cache, host, torch.empty((0, 2), dtype=torch.int32, device=device), to_host=to_host)
    assert torch.equal(bits(cache), bits(before[0]))
    assert torch.equal(bits(host), bits(before[1]))


def test_blocks_beyond_int32_words(device: torch.device) -> None:
    """The last of so many blocks begins 2 ** 31 words from the first; only what is touched takes memory on a CPU."""
    shape, blocks = (2, 8, 16, 512), 2**31 // (2 * 8 * 16 * 512 // 2) + 2
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 3 * 2**33:
        pytest.skip("takes 9 GB of the GPU")
    if device.type == "cuda":
        cache = torch.empty((1, blocks, *shape), dtype=torch.bfloat16, device=device)
    else:
        count = blocks * int(np.prod(shape))
        cache = torch.from_numpy(np.zeros(count, np.int16)).view(torch.bfloat16).view(1, blocks, *shape)
    host = made_of_bytes(3, 2, 1, *shape, dtype=torch.bfloat16, device="host")
    expected = host[1].clone()
    transfer_blocks(cache, host, torch.tensor([[blocks - 1, 1]], dtype=torch.int32, device=device), to_host=False)
    assert torch.equal(bits(cache[0, -1]), bits(expected[0]))
    host.zero_()
    transfer_blocks(cache, host, torch.tensor([[blocks - 1, 0]], dtype=torch.int32, device=device), to_host=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits(host[0]), bits(expected))
