"""Words of the Triton kernels: 32 bits at a time, or single elements where words do not fit.

A word is one float32 or two neighbouring bfloat16, the first in the low half. Pairs cost fewer instructions: they are
split, joined and given their signs together. A row with an odd number of bfloat16 is processed as single elements, as
int16 of the same bits, because not every Triton (for example its interpreter) rounds to nearest even bfloat16; float16
always is a single element.
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
    """Pairs of bfloat16 from float32 bits that bfloat16 represents exactly."""
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
    """The stored form of float32, rounded to nearest even; IS_EXACT: if it is bfloat16, that represents each value."""
    if dtype == tl.int16:
        if IS_EXACT:
            nearest = bits >> 16
        else:
            # a GPU's NaN has all bits set and would become -0
            even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            nearest = tl.where((bits & MAGNITUDE) > EXPONENT, BFLOAT16_NAN, even)
        return nearest.to(tl.int16)
    else:
        return as_float(bits).to(dtype)
