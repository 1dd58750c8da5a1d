"""What the Triton kernels read and write: words of 32 bits, or single elements where words do not fit.

A word is one float32 or two neighbouring bfloat16, the first in the low half. Two at a time cost fewer instructions:
they are taken apart, put together and given their signs as one. Where a row has an odd number of bfloat16, they are
taken singly, as int16 of the same bits, because not every Triton (its interpreter, for one) rounds to bfloat16 to
nearest even; float16 always is.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-(1 << 31))
EXPONENT = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
HIGH = tl.constexpr(-(1 << 16))
LOW = tl.constexpr(0xFFFF)
BFLOAT16_NAN = tl.constexpr(0x7FC0)


@triton.jit
def as_bits(x):
    """The bits of float32, as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """The float32 of these int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_bits(pairs):
    """The float32 bits of the first of each pair of bfloat16."""
    return pairs << 16


@triton.jit
def second_bits(pairs):
    """The float32 bits of the second of each pair of bfloat16."""
    return pairs & HIGH


@triton.jit
def paired(first, second):
    """Pairs of bfloat16 from the bits of float32 that bfloat16 has, too."""
    return ((first >> 16) & LOW) | (second & HIGH)


@triton.jit
def single_bits(raw):
    """The float32 bits of single elements, exactly; subnormals stay."""
    if raw.dtype == tl.int16:
        return raw.to(tl.int32) << 16
    else:
        return as_bits(raw.to(tl.float32))


@triton.jit
def single(bits, dtype: tl.constexpr, IS_EXACT: tl.constexpr):
    """What is stored of float32, rounded to nearest even; IS_EXACT says that bfloat16 has each value, if it is that."""
    if dtype == tl.int16:
        if IS_EXACT:
            nearest = bits >> 16
        else:
            # a GPU's NaN has all bits set: it would become -0
            even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            nearest = tl.where((bits & MAGNITUDE) > EXPONENT, BFLOAT16_NAN, even)
        return nearest.to(tl.int16)
    else:
        return as_float(bits).to(dtype)
