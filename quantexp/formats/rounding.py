"""The arithmetic of an element in torch: float32 as bits, rounding to the grid, the power-of-two scale of a block.

Rounding to a power-of-two spacing is done by the floating-point adder. In float32, numbers from 2^k to 2^(k+1) are
2^(k-23) apart. With C = 1.5 * 2^k, v + C is therefore v rounded to a multiple of 2^(k-23), to nearest even, and
(v + C) - C is exact. The callers choose k for each value; where the element is subnormal, k does not depend on the
exponent of v.

Nearest away sets the lowest bit of v first. A tie has that bit clear, so it moves just above itself; ties are even in
units of that bit, so no other value crosses one.

Stochastic rounding takes a random integer r in [0, 2^24) for each value (see `philox`). With f the distance of v from
the multiple of the spacing below it, in units of the spacing, v is rounded up if r < floor(2^24 f), and down otherwise:
the probability of rounding up is f, truncated to 24 bits. All steps are exact in float32. Values beyond the largest one
still saturate, which no rounding makes unbiased. Towards zero, every value is rounded down.

An MX block's scale follows from its amax by one formula for all four rules: add an offset to the bits, clear the
mantissa, subtract emax from the exponent. The offset carries into the exponent exactly where the rule rounds up:

    floor  0                  rceil  2^23 - 1 - mantissa(max)
    ceil   2^23 - 1           even   2^(22 - mantissa bits)

An FP8 number (OCP OFP8 v1.0) beyond the largest finite value becomes that value if saturating, else the element's
overflow result: Inf in E5M2, NaN in E4M3, which has no infinity. A number that rounds to the largest value is not
beyond it. NaN stays NaN; signed zeros keep their sign.

HiFloat8 (arXiv 2409.16626, section 3) trades mantissa for exponent bits. With E the exponent of a value, the mantissa
has m = 4 - max(1, floor(log2 |E|)) bits:

    |E| <= 3: 3        4 .. 7: 2        8 .. 15: 1        E in -22 .. -16: 0 (powers of two only)

A value is rounded to the m bits of its own exponent; a carry into the next binade is again a value of the format.
|x| < 2^-23 becomes 0, and there is no negative zero. |x| >= 40960 is beyond the largest finite value 32768: it becomes
32768 or infinite.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from quantexp.formats.layout import Scratch
from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import HIF8
from quantexp.formats.types import Element, Rounding, ScaleRule

#: Bits of each random number: the significant bits of float32.
RANDOM_BITS = 24
MANTISSA_BITS = 23
_ONE = 1 << MANTISSA_BITS
#: Bias of the exponent field, and of an E8M0 scale byte.
BIAS = 127
SIGN_MASK = -(1 << 31)
MAGNITUDE_MASK = 0x7FFFFFFF
EXPONENT_MASK = 0x7F800000
NAN_BITS = 0x7FC00000
#: 2^-127, the only E8M0 scale that is subnormal in float32.
_TWO_TO_MINUS_127_BITS = 1 << 22
#: Exponent fields of HiFloat8's smallest value and of its largest binade.
_LOWEST_BITS = (HIF8.emin + BIAS) << MANTISSA_BITS
_HIGHEST_BITS = (HIF8.emax + BIAS) << MANTISSA_BITS


def _word(bits: int) -> Tensor:
    """A tensor that operators accept unconverted on any device; they convert a Python number at each call."""
    return torch.tensor(bits, dtype=torch.int32, device="cpu")


EXPONENT_WORD = _word(EXPONENT_MASK)
_FIELDS_OF_INVERSES = _word((2 * BIAS) << MANTISSA_BITS)


def as_bits(x: Tensor) -> Tensor:
    """The bits of a float32 tensor, as int32 over the same memory."""
    return x.view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    """The float32 tensor with these int32 bits, over the same memory."""
    return bits.view(torch.float32)


def power_of_two(field: Tensor) -> Tensor:
    """2^s in float32, exactly, from the exponent field (s + 127) 2^23 as int32, s in [-127, 127].

    The field of all ones, which is NaN as an E8M0 scale, gives NaN.
    """
    bits = field.clamp_min(_TWO_TO_MINUS_127_BITS)
    return from_bits(bits.masked_fill_(field == EXPONENT_WORD, NAN_BITS))


def inverse_power_of_two(field: Tensor) -> Tensor:
    """2^-s in float32, exactly, from the exponent field (s + 127) 2^23.

    The field of all ones gives 2^-127; no result may depend on it.
    """
    return from_bits((_FIELDS_OF_INVERSES - field).clamp_min_(_TWO_TO_MINUS_127_BITS))


def break_ties(v: Tensor, rounding: Rounding) -> None:
    """Modify v (float32, in place) so that rounding to nearest even then breaks ties as required.

    Signs are kept. Zero becomes the smallest subnormal, which rounds to zero; Inf becomes NaN.
    """
    if rounding is Rounding.AWAY:
        as_bits(v).bitwise_or_(1)


def round_element(
    v: Tensor, element: Element, rounding: Rounding, random: Tensor | None, magic: Tensor
) -> None:
    """Round v >= 0 (float32, in place) to the element's grid; `magic` is a temporary of v's shape.

    The grid continues beyond the element's largest value. `random` has v's shape (see `philox`), and is required if
    rounding is stochastic.
    """
    if not rounding.is_to_nearest:
        torch.bitwise_and(as_bits(v), EXPONENT_WORD, out=as_bits(magic))
        magic.clamp_min_(2.0**element.emin).mul_(2.0**-element.mantissa_bits)
        round_down(v, magic, rounding, random)
    else:
        break_ties(v, rounding)
        round_magnitudes(v, element, magic)


def round_down(v: Tensor, step: Tensor, rounding: Rounding, random: Tensor | None) -> None:
    """Round v >= 0 (float32, in place) towards zero, or up at random, to multiples of `step`, powers of two.

    NaN stays NaN.
    """
    v.div_(step)
    if rounding is Rounding.ZERO:
        v.floor_().mul_(step)
        return
    assert random is not None, "stochastic rounding has random numbers"
    below = v.floor()
    v.sub_(below).mul_(2.0**RANDOM_BITS).floor_()
    below.add_(random < v)
    torch.mul(below, step, out=v)


def round_to_multiples(v: Tensor, magic: Tensor, factor: float = 1.0) -> None:
    """Round v (float32, in place) to multiples of factor * magic / (1.5 * 2^23), nearest even; 0 is +0.

    factor * magic must be exact in float32, so that it does not matter whether it is rounded before it is added.
    """
    v.add_(magic, alpha=factor).sub_(magic, alpha=factor)


def round_magnitudes(v: Tensor, element: Element, magic: Tensor) -> None:
    """Round v >= 0 (float32, in place) to the element's grid, its subnormals included.

    The grid continues beyond the element's largest value. `magic` is a temporary of v's shape.
    """
    torch.bitwise_and(as_bits(v), EXPONENT_WORD, out=as_bits(magic))
    magic.clamp_min_(2.0**element.emin)
    round_to_multiples(v, magic, 1.5 * 2.0 ** (MANTISSA_BITS - element.mantissa_bits))


def fp8_values(
    x_N: Tensor, spec: QuantSpec, scale: Tensor | None, random_N: Tensor | None, scratch: Scratch
) -> Tensor:
    """e(x s) of FP8 in float32, a scratch buffer."""
    element = spec.fmt.element
    v, sign, magic = scratch.of_shape(x_N.shape)
    v.copy_(x_N)
    if scale is not None:
        v.mul_(scale)
    torch.bitwise_and(as_bits(v), SIGN_MASK, out=as_bits(sign))
    as_bits(v).bitwise_and_(MAGNITUDE_MASK)
    v.clamp_max_(element.max if spec.saturate else 2 * element.max)
    round_element(v, element, spec.rounding, random_N, magic)
    if not spec.saturate:
        v.masked_fill_(v > element.max, math.inf if element.inf_codes else math.nan)
    as_bits(v).bitwise_or_(as_bits(sign))
    return v


def hif8_values(
    x_N: Tensor, spec: QuantSpec, scale: Tensor | None, random_N: Tensor | None, scratch: Scratch
) -> Tensor:
    """hif8(x s) in float32, a scratch buffer; NaN stays NaN."""
    v, magic, exponent = scratch.of_shape(x_N.shape)
    v.copy_(x_N)
    if scale is not None:
        v.mul_(scale)
    bound = HIF8.max if spec.saturate else 2 * HIF8.max
    v.clamp_(-bound, bound)
    if not spec.rounding.is_to_nearest:
        _hif8_down(v, magic, exponent, spec.rounding, random_N)
    else:
        break_ties(v, spec.rounding)
        spacing_to(magic, v, exponent, factor=1.5 * 2.0**MANTISSA_BITS)
        round_to_multiples(v, magic)
    if not spec.saturate:
        v.masked_fill_(v > HIF8.max, math.inf).masked_fill_(v < -HIF8.max, -math.inf)
    return v


def _hif8_down(
    v: Tensor, step: Tensor, scratch: Tensor, rounding: Rounding, random: Tensor | None
) -> None:
    spacing_to(step, v, scratch)
    sign = as_bits(v).bitwise_and(SIGN_MASK)
    round_down(v.abs_(), step, rounding, random)
    as_bits(v).bitwise_or_(sign)
    v.add_(0.0)  # turns -0 into +0


def spacing_to(out: Tensor, v: Tensor, scratch: Tensor, *, factor: float = 1.0) -> None:
    """Write factor * 2^(E - m) to `out`: 2^(E - m) is the grid's spacing in the binade of each v.

    All three are float32 and of one shape. E is -22 below the smallest value, and 15 above the largest binade and for
    NaN and Inf.
    """
    bits = as_bits(out)
    torch.bitwise_and(as_bits(v), EXPONENT_MASK, out=bits)
    bits.clamp_(_LOWEST_BITS, _HIGHEST_BITS)
    # The exponent field, read as a number, is (E + 127) 2^23, exactly. Minus the bias it is E 2^23, and its own
    # exponent is 23 + floor(log2 |E|).
    scratch.copy_(bits)
    scratch.sub_(BIAS << MANTISSA_BITS)
    as_bits(scratch).bitwise_and_(EXPONENT_MASK)
    scratch.clamp_min_(2.0 ** (MANTISSA_BITS + 1))
    out.mul_(scratch).mul_(factor * 2.0 ** -(MANTISSA_BITS + 4))


def scale_field(amax_bits: Tensor, element: Element, rule: ScaleRule) -> Tensor:
    """The exponent field (s + 127) 2^23 of each block's scale, from the bits of its amax.

    Both are int32; the bits are those of a float32. s lies in [-127, 127]; zero gives the smallest. NaN and Inf give
    the field of all ones, which represents NaN. A subnormal amax needs no special case: under every rule and element it
    is below the smallest scale.
    Source: OCP MX v1.0 sections 5.4.1 (E8M0) and 6.3 (conversion).
    """
    offset = rule_offset(element, rule)
    field = (amax_bits + offset if offset else amax_bits).bitwise_and(EXPONENT_WORD)
    field.sub_(element.emax << MANTISSA_BITS).clamp_min_(0)
    return field.masked_fill_(amax_bits >= EXPONENT_WORD, EXPONENT_MASK)


def can_saturate(rule: ScaleRule) -> bool:
    """Whether a block's amax may lie beyond max * 2^s, so that elements must be clamped.

    By definition amax <= max * 2^s under RCEIL, and amax <= 2^(s + emax) under CEIL.
    """
    return rule in (ScaleRule.FLOOR, ScaleRule.EVEN)


def rule_offset(element: Element, rule: ScaleRule) -> int:
    """The offset that the rule adds to the bits of amax."""
    match rule:
        case ScaleRule.FLOOR:
            return 0
        case ScaleRule.CEIL:
            return _ONE - 1
        case ScaleRule.RCEIL:
            return _ONE - 1 - _mantissa(element.max)
        case ScaleRule.EVEN:
            return 1 << (MANTISSA_BITS - 1 - element.mantissa_bits)


def _mantissa(value: float) -> int:
    """The mantissa field of a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits & (_ONE - 1)
