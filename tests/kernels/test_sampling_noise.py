"""The noise that kernels make is the noise of ``gpu_worker.sampling.noise``."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from gpu_worker.kernels.sampling_layout import RECORD
from gpu_worker.kernels.sampling_noise import gumbel, id_of, ranked, row_key, uniform_bits, value_of
from gpu_worker.sampling.cuda_sampler import CudaSampler
from gpu_worker.sampling.noise import Purpose, _bits, gumbel_of, row_keys
from tests.kernels.sampling_pair import make_request

SIZE = 4096


@triton.jit
def _noise_kernel(
    records_ptr, positions_ptr, bits_ptr, noise_ptr, RECORD: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr
):
    row = tl.program_id(0)
    ids = tl.arange(0, N)
    low, high = row_key(records_ptr + row * RECORD, tl.load(positions_ptr + row))
    tl.store(bits_ptr + row * N + ids, uniform_bits(low, high, ids))
    tl.store(noise_ptr + row * N + ids, gumbel(low, high, ids, FAST))


@triton.jit
def _rank_kernel(values_ptr, ids_ptr, keys_ptr, values_back_ptr, ids_back_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    keys = ranked(tl.load(values_ptr + at), tl.load(ids_ptr + at))
    tl.store(keys_ptr + at, keys)
    tl.store(values_back_ptr + at, value_of(keys))
    tl.store(ids_back_ptr + at, id_of(keys))


def test_noise_has_the_same_bits_and_the_same_values(device: torch.device) -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, 42, 2**40]
    choices = [0, 1, 127, 3, 0, 5, 0, 2]
    positions = torch.tensor([0, 1, 5, 131071, 1 << 30, 77, 42, 9], dtype=torch.int32)
    sampler = CudaSampler(len(seeds), SIZE, None, device)
    sampler.add([make_request(slot, choices[slot], seed=seed) for slot, seed in enumerate(seeds)])
    bits = torch.empty((len(seeds), SIZE), dtype=torch.int32, device=device)
    noise = torch.empty((len(seeds), SIZE), device=device)
    _noise_kernel[(len(seeds),)](
        sampler.params.records, positions.to(device), bits, noise, RECORD=RECORD, N=SIZE, FAST=noise.is_cuda
    )
    ids = torch.arange(SIZE, dtype=torch.int32)
    keys = row_keys(torch.tensor(seeds), torch.tensor(choices), positions.long(), Purpose.SAMPLE)
    assert torch.equal(bits.cpu(), _bits(keys, ids) & 0x7FFFFFFF)
    torch.testing.assert_close(noise.cpu(), gumbel_of(keys, ids), rtol=0, atol=6e-6)


def test_keys_are_in_order_and_can_be_taken_apart(device: torch.device) -> None:
    values = [-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 0.5, 0.5, 2.0, 3e38, np.inf, -1.5, -0.0, 7.0, 7.0, 8.0]
    ids = [0, 2**31 - 1, 5, 6, 3, 7, 9, 8, 1, 4, 2, 12, 11, 0, 151935, 3]
    v, i = torch.tensor(values, device=device), torch.tensor(ids, dtype=torch.int32, device=device)
    keys = torch.empty(16, dtype=torch.int64, device=device)
    values_back, ids_back = torch.empty_like(v), torch.empty_like(i)
    _rank_kernel[(1,)](v, i, keys, values_back, ids_back, N=16)
    assert ids_back.tolist() == ids
    assert values_back.tolist() == v.tolist()
    order = sorted(range(16), key=lambda e: (float(v[e]), -ids[e]))
    assert keys.argsort().tolist() == order
