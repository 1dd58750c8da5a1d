"""Tiles on a GPU, in Triton: loads, stores, products, rounding to the working dtype, and quantisation.

    # R queries of a tile, K keys of a tile, W width of a head, padded with zeros to a power of two
    # a tensor is a tuple: address, strides over sequences, heads and tokens; elements of a head are contiguous

Within a kernel a tile of R x K is float32, each element representable in the working dtype. The device functions of
`quantexp.formats.kernels` quantise it, with the same arithmetic as any other tensor. HOW selects the format:

    (NOT,)                                                              the working dtype
    (MX, by keys, offset, emax, emin, mantissa bits, max, is away)      blocks of 32 along keys, or else along queries
    (HIF8, is power, is away, saturates)                                under the scale at `scale`, or none

Triton's interpreter multiplies bfloat16 as integers and does not round to nearest bfloat16. If IS_INTERPRETED,
products are computed in float32, which represents every product of two 16-bit elements, and the bits are rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_hif8 import under_scale
from quantexp.formats.kernels.triton_mx import BLOCK, quantised
from quantexp.formats.kernels.triton_words import as_bits, as_float, single

NOT = tl.constexpr(0)
MX = tl.constexpr(1)
HIF8 = tl.constexpr(2)


@triton.jit
def tile_of(x, b, h, tokens, T, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The rows of these tokens, zeros from T on, [tokens, PADDED]."""
    w = tl.arange(0, PADDED)
    head = x[0] + b.to(tl.int64) * x[1] + h.to(tl.int64) * x[2]
    at = tokens.to(tl.int64)[:, None] * x[3] + w[None, :]
    return tl.load(head + at, mask=(tokens < T)[:, None] & (w < WIDTH)[None, :], other=0.0)


@triton.jit
def of_row(x_NT, n, queries, T):
    """One number per row, 0 from T on."""
    return tl.load(x_NT + n.to(tl.int64) * T + queries, mask=queries < T, other=0.0)


@triton.jit
def store_tile(y, b, h, tokens, T, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store float32 values, representable in the working dtype, to the rows of these tokens."""
    w = tl.arange(0, PADDED)
    head = y[0] + b.to(tl.int64) * y[1] + h.to(tl.int64) * y[2]
    at = tokens.to(tl.int64)[:, None] * y[3] + w[None, :]
    inside = (tokens < T)[:, None] & (w < WIDTH)[None, :]
    tl.store(head + at, tile.to(y[0].dtype.element_ty), mask=inside)


@triton.jit
def multiplied(a, b, total, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """`total` + a b, in float32; a and b are of the working dtype, or float32 representable in it."""
    a, b = a.to(DTYPE), b.to(DTYPE)
    if IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """The nearest value in the working dtype, as float32; ties to even."""
    if IS_INTERPRETED and DTYPE.is_bf16():
        return as_float(single(as_bits(x), tl.int16, False).to(tl.int32) << 16)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def quantised_tile(x, scale, HOW: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """A quantised tile of R x K; R and K are multiples of 32, and so are its first query and key."""
    R: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    if HOW[0] == MX:
        if HOW[1]:
            blocks = tl.reshape(x, (R, K // BLOCK, BLOCK))
            y = quantised(blocks, 2, False, HOW[2], HOW[3], HOW[4], HOW[5], HOW[6], HOW[7], True)
        else:
            blocks = tl.reshape(x, (R // BLOCK, BLOCK, K))
            y = quantised(blocks, 1, False, HOW[2], HOW[3], HOW[4], HOW[5], HOW[6], HOW[7], False)
        return tl.reshape(y, (R, K))
    elif HOW[0] == HIF8:
        s = tl.full((), 1.0, tl.float32) if scale is None else tl.load(scale)
        y = under_scale(as_bits(x), s, HOW[1], HOW[2], HOW[3])
        return rounded(y, DTYPE, IS_INTERPRETED)
    else:
        return x
