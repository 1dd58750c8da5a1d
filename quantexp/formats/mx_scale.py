"""The power-of-two scale of an MX block, from its amax.

All four rules are one formula on the bits of amax: add an offset, clear the mantissa, subtract emax from the exponent.
The offset carries into the exponent exactly where the rule rounds up:

    floor  0                  rceil  2^23 - 1 - mantissa(max)
    ceil   2^23 - 1           even   2^(22 - mantissa bits)
"""

from __future__ import annotations

import struct

from torch import Tensor

from quantexp.formats.bits import EXPONENT_MASK, EXPONENT_WORD, MANTISSA_BITS
from quantexp.formats.types import Element, ScaleRule

_ONE = 1 << MANTISSA_BITS


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
