"""The numbers of ``gpu_worker.sampling.noise`` inside of kernels, and float32 keys in sortable order."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.sampling_layout import KEY_HIGH, KEY_LOW, SCALE

SAMPLE_PURPOSE = tl.constexpr(1)
"""``noise.Purpose.SAMPLE``."""


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_key(record_ptr, position):
    """The two halves (uint32) of ``noise.keys_at`` for a slot's record and the position of the drawn token."""
    low = tl.load(record_ptr + KEY_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record_ptr + KEY_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    x = _mix64((((high << 32) | low) ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    x = _mix64(x ^ SAMPLE_PURPOSE)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def uniform_bits(low, high, ids):
    """``noise._bits`` with the sign cleared: int32 in 0..2^31 - 1 for int32 ``ids``."""
    bits = _mix32(ids.to(tl.uint32) * 0x9E3779B9 + low)
    bits = _mix32(bits ^ high)
    return (bits & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def gumbel(low, high, ids, FAST: tl.constexpr):
    """``noise.gumbel_of``: float32, within 6e-6 of it.

    ``-log(-log1p(-u))``. The inner logarithm is a polynomial (minimax, relative error 2e-8) for small ``u``, which make
    the large noise; elsewhere, and outside, the hardware's logarithm (error 2^-22) is about as good as the rounding of
    the sum of logit and noise.
    """
    u = (uniform_bits(low, high, ids).to(tl.float32) + 0.5) * 4.656612873077393e-10
    small = tl.fma(u, 0.26131603533672043, 0.24314277556449132)
    small = tl.fma(small, u, 0.3336270970327582)
    small = tl.fma(small, u, 0.49999612662439874)
    small = tl.fma(small, u, 1.0) * u
    exponential = tl.where(u < 0.125, small, _log2(1.0 - u, FAST) * -0.6931471805599453)
    return _log2(exponential, FAST) * -0.6931471805599453


@triton.jit
def scale_of(record_ptr):
    """1 / temperature of a slot."""
    return tl.load(record_ptr + SCALE).to(tl.float32, bitcast=True)


@triton.jit
def sortable(values):
    """float32 as int32 in the same order; both zeros are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unsortable(keys):
    """int32 of ``sortable`` as float32."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(values, ids):
    """int64 keys: the larger value first, the lowest id first among equals; undone by ``id_of``, ``value_of``."""
    return (sortable(values).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def id_of(keys):
    return (0xFFFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def value_of(keys):
    return unsortable((keys >> 32).to(tl.int32))
