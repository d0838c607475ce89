"""Counter-based random numbers: a pure function of (seed, choice, position, purpose, token id).

No generator has a state, so that neither batch mates nor preemption nor a restart can change a draw. The key of a row
is mixed with SplitMix64's finalizer (Steele et al., 2014), each id with two rounds of a 32-bit finalizer of murmur type
(constants by Wellons, "lowbias32").
"""

from __future__ import annotations

import enum

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_ID_STEP = 0x9E3779B9


class Purpose(enum.IntEnum):
    """What numbers are drawn for; equal counters with different purposes give unrelated numbers."""

    SAMPLE = 1


def gumbel(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, size: int, purpose: Purpose = Purpose.SAMPLE
) -> torch.Tensor:
    """Standard Gumbel noise, [rows, size] float32; ``argmax(logits + noise)`` draws from softmax(logits).

    Args:
        seeds: [rows] int64.
        choices: [rows] int64.
        positions: [rows] int64, of the token that is drawn.
    """
    ids = torch.arange(size, dtype=torch.int32, device=seeds.device)
    return gumbel_of(row_keys(seeds, choices, positions, purpose), ids)


def gumbel_of(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same numbers for some token ids.

    Args:
        keys: [rows] int64 of ``row_keys``.
        ids: [size] or [rows, size] int32.
    """
    uniform = _bits(keys, ids).bitwise_and_(0x7FFFFFFF).float()
    # log1p keeps the small values exact, which make the large noise.
    exponential = uniform.add_(0.5).mul_(-(2.0**-31)).log1p_().neg_()
    return exponential.log_().neg_()


def row_keys(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """[rows] int64 keys."""
    return keys_at(request_keys(seeds, choices), positions, purpose)


def request_keys(seeds: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """[rows] int64: what of a row's key is the same at all positions."""
    return _mix64((_mix64(seeds + _signed(_GOLDEN, 64)) ^ choices) + _signed(_GOLDEN, 64))


def keys_at(requests: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """[rows] int64: ``row_keys`` from ``request_keys``."""
    return _mix64(_mix64((requests ^ positions) + _signed(_GOLDEN, 64)) ^ int(purpose))


def _bits(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[rows, size] int32, evenly distributed."""
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    bits = _mix32_(ids * _signed(_ID_STEP, 32) + low)
    return _mix32_(bits.bitwise_xor_(high))


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31, 64)


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    x.bitwise_xor_(_shifted(x, 16, 32)).mul_(_signed(0x7FEB352D, 32))
    x.bitwise_xor_(_shifted(x, 15, 32)).mul_(_signed(0x846CA68B, 32))
    return x.bitwise_xor_(_shifted(x, 16, 32))


def _shifted(x: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """A logical shift to the right, which torch has only as an arithmetic one."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value
