"""KV blocks between the pool on the device and pieces of memory where their layers lie side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.kernels import block_transfer
from gpu_worker.kernels.block_transfer import gather_blocks, scatter_blocks, words_of

LAYERS, BLOCKS = 3, 7
WANTED = [1, 6, 3, 5]


def made_of_bytes(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Any bits there are, those of NaNs included."""
    count = int(np.prod(shape)) * dtype.itemsize
    made = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(dtype).view(shape).to(device)


def piece_for(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """Room for blocks, with something in it."""
    layers, _, size = words_of(cache).shape
    return made_of_bytes(2, blocks, layers, size, dtype=torch.int32, device=cache.device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


@pytest.mark.parametrize("gathers", [True, False], ids=["gather", "scatter"])
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
        ((2, 1, 1, 6), torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_as_torch_copies(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    programs: int,
    gathers: bool,
) -> None:
    monkeypatch.setattr(block_transfer, "PROGRAMS", programs)
    cache = made_of_bytes(1, LAYERS, BLOCKS, *shape, dtype=dtype, device=device)
    piece = piece_for(cache, len(WANTED))
    wanted_cache, wanted_piece = words_of(cache).clone(), piece.clone()
    for index, block in enumerate(WANTED):
        if gathers:
            wanted_piece[index] = wanted_cache[:, block]
        else:
            wanted_cache[:, block] = wanted_piece[index]
    blocks = torch.tensor(WANTED, dtype=torch.int32, device=device)
    (gather_blocks if gathers else scatter_blocks)(cache, blocks, piece)
    assert torch.equal(words_of(cache), wanted_cache)
    assert torch.equal(piece, wanted_piece)


def test_no_blocks(device: torch.device) -> None:
    cache = made_of_bytes(1, LAYERS, BLOCKS, 2, 1, 16, 16, dtype=torch.float16, device=device)
    before, none = cache.clone(), torch.empty(0, dtype=torch.int32, device=device)
    for transfer in (gather_blocks, scatter_blocks):
        transfer(cache, none, piece_for(cache, 0))
    assert torch.equal(bits(cache), bits(before))


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
    piece, last = piece_for(cache, 1), torch.tensor([blocks - 1], dtype=torch.int32, device=device)
    expected = piece.clone()
    scatter_blocks(cache, last, piece)
    assert torch.equal(words_of(cache)[0, -1], expected[0, 0])
    piece.zero_()
    gather_blocks(cache, last, piece)
    assert torch.equal(piece, expected)
