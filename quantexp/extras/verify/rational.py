"""The elements of the formats as lists of Fractions, and the exponents of block scales.

The parameters are those of OCP MX v1.0 section 5.3 and of the HiFloat8 paper (arXiv 2409.16626) section 3. This module
imports nothing from `quantexp.formats`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

#: name: emin, mantissa bits, emax, max
MX_ELEMENTS = {
    "mxfp8_e4m3": (-6, 3, 8, Fraction(448)),
    "mxfp8_e5m2": (-14, 2, 15, Fraction(57344)),
    "mxfp6_e2m3": (0, 3, 2, Fraction(15, 2)),
    "mxfp6_e3m2": (-2, 2, 4, Fraction(28)),
    "mxfp4_e2m1": (0, 1, 2, Fraction(6)),
}
#: FP8 format: the MX format of the same element, and whether it has infinity.
FP8_ELEMENTS = {"fp8_e4m3": ("mxfp8_e4m3", False), "fp8_e5m2": ("mxfp8_e5m2", True)}
SCALE_RULES = ("floor", "rceil", "ceil", "even")


@cache
def mx_magnitudes(name: str) -> tuple[Fraction, ...]:
    """All magnitudes by code: subnormals, then one binade after the other up to max."""
    emin, mantissa_bits, emax, largest = MX_ELEMENTS[name]
    steps = 1 << mantissa_bits
    subnormals = [Fraction(2) ** (emin - mantissa_bits) * i for i in range(steps)]
    normals = [
        Fraction(2) ** exponent * (1 + Fraction(i, steps))
        for exponent in range(emin, emax + 1)
        for i in range(steps)
    ]
    return tuple(value for value in subnormals + normals if value <= largest)


@cache
def hif8_magnitudes() -> tuple[Fraction, ...]:
    """All finite magnitudes in ascending order, listed region by region."""
    powers = [Fraction(2) ** e for e in range(-22, -15)]
    normals = [
        Fraction(2) ** e * (1 + Fraction(i, 1 << m))
        for e in range(-15, 16)
        for m in [3 if abs(e) <= 3 else 2 if abs(e) <= 7 else 1]
        for i in range(1 << m)
    ]
    return (Fraction(0), *powers, *normals[:-1])  # the last, 1.5 * 2^15, is the code of infinity


def floor_log2(value: Fraction) -> int:
    """The exponent of value > 0."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def mx_scale(amax: Fraction, name: str, rule: str) -> int:
    """The exponent s of the scale of a block of an MX format."""
    _, mantissa_bits, _, largest = MX_ELEMENTS[name]
    return power_of_two_scale(amax, largest, mantissa_bits, rule)


def power_of_two_scale(amax: Fraction, largest: Fraction, mantissa_bits: int, rule: str) -> int:
    """The exponent s of a block's scale, for elements up to `largest`."""
    if amax == 0:
        return -127
    emax, exponent = floor_log2(largest), floor_log2(amax)
    if rule == "floor":
        s = exponent - emax
    elif rule == "ceil":
        s = exponent - emax + (amax > Fraction(2) ** exponent)
    elif rule == "rceil":
        s = floor_log2(amax / largest)
        s += amax > largest * Fraction(2) ** s
    else:
        step = Fraction(2) ** (exponent - mantissa_bits)
        s = floor_log2(math.floor(amax / step + Fraction(1, 2)) * step) - emax
    return min(max(s, -127), 127)
