"""float8 (e4m3) in the KV cache: how it is written, and how it becomes an operand of a product.

Products take it as float16, which holds every e4m3 number exactly; one instruction converts two of them (there is none
to bfloat16). Matrices come to the registers, and are transposed on the way, in elements of 16 bits. So decode rows read
keys and values as pairs of dims, an int16 each,

    pair[token, j] = value[token, 2 * j] | value[token, 2 * j + 1] << 8

which make one product of the even dims and one of the odd ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has no assembly, and does not round to float8 as a GPU does."""
LARGEST_FLOAT16 = tl.constexpr(65504.0)
LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """float32 in the dtype of the cache; to e4m3 rounded to the nearest, and what is too large becomes 448."""
    if dtype == tl.float8e4nv and IS_INTERPRETED:
        x = tl.clamp(x, -LARGEST_E4M3, LARGEST_E4M3)
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        # The sum has steps of 2^-9, as the numbers below 2^-6 have.
        subnormal = (x + 24576.0) - 24576.0
        return tl.where(tl.abs(x) < 0.015625, subnormal, normal).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def query_operand(query, cache_dtype: tl.constexpr):
    """The query in the dtype of products with what is in the cache: its own, or float16 beside e4m3."""
    if cache_dtype == tl.float8e4nv:
        return tl.clamp(query.to(tl.float32), -LARGEST_FLOAT16, LARGEST_FLOAT16).to(tl.float16)
    else:
        return query


@triton.jit
def split_query(query):
    """The even and the odd dims of a query [rows, dims]."""
    return tl.split(query_operand(query, tl.float8e4nv).reshape(query.shape[0], query.shape[1] // 2, 2))


@triton.jit
def unpack(pair):
    """The e4m3 numbers in the low and in the high bytes of int16, as float16."""
    if IS_INTERPRETED:
        low = (pair & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pair >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 first, second;
            .reg .b32 a, b;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, second;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            }
            """,
            "=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def load_pairs(pointer, place, is_token, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Pairs [tokens, DIM_TILE // 2] of the keys or values at ``pointer + place``; zeros for what is no token."""
    dim_pair = tl.arange(0, DIM_TILE // 2)
    mask = is_token[:, None]
    if HEAD_DIM != DIM_TILE:
        mask &= (dim_pair < HEAD_DIM // 2)[None, :]
    pointers = pointer.to(tl.pointer_type(tl.int16), bitcast=True) + (place // 2)[:, None] + dim_pair[None, :]
    return tl.load(pointers, mask, other=0)


@triton.jit
def multiply_keys(even_query, odd_query, pair):
    """[rows, tokens] float32: the products of a query with keys."""
    low, high = unpack(pair)
    return tl.dot(odd_query, tl.trans(high), tl.dot(even_query, tl.trans(low)))


@triton.jit
def add_products(even, odd, probabilities, pair):
    """Add the products of ``probabilities`` [rows, tokens] with the even and the odd dims of values."""
    low, high = unpack(pair)
    probabilities = probabilities.to(tl.float16)
    return tl.dot(probabilities, low, even), tl.dot(probabilities, high, odd)


@triton.jit
def interleave(even, odd):
    """[rows, dims / 2] of the even and of the odd dims as [rows, dims]."""
    return tl.join(even, odd).reshape(even.shape[0], 2 * even.shape[1])
