"""The formats once more, in exact rational arithmetic, by another road: nearest of all values.

Nothing here is taken from the package. The parameters are those of OCP MX v1.0 section 5.3 and of
the HiFloat8 paper (arXiv 2409.16626) section 3; a value is quantised by looking for the nearest
entry in the list of all magnitudes, so there is neither a binade nor a magic constant in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction

import numpy as np

#: name: emin, mantissa bits, emax, max
MX_ELEMENTS = {
    "mxfp8_e4m3": (-6, 3, 8, Fraction(448)),
    "mxfp8_e5m2": (-14, 2, 15, Fraction(57344)),
    "mxfp6_e2m3": (0, 3, 2, Fraction(15, 2)),
    "mxfp6_e3m2": (-2, 2, 4, Fraction(28)),
    "mxfp4_e2m1": (0, 1, 2, Fraction(6)),
}
SCALE_RULES = ("floor", "rceil", "ceil", "even")


def mx_magnitudes(name: str) -> list[Fraction]:
    """All magnitudes by their code: subnormals, then one binade after the other up to max."""
    emin, mantissa_bits, emax, largest = MX_ELEMENTS[name]
    steps = 1 << mantissa_bits
    subnormals = [Fraction(2) ** (emin - mantissa_bits) * i for i in range(steps)]
    normals = [
        Fraction(2) ** exponent * (1 + Fraction(i, steps))
        for exponent in range(emin, emax + 1)
        for i in range(steps)
    ]
    return [value for value in subnormals + normals if value <= largest]


def hif8_magnitudes() -> list[Fraction]:
    """All finite magnitudes in ascending order, written down region by region."""
    powers = [Fraction(2) ** e for e in range(-22, -15)]
    normals = [
        Fraction(2) ** e * (1 + Fraction(i, 1 << m))
        for e in range(-15, 16)
        for m in [3 if abs(e) <= 3 else 2 if abs(e) <= 7 else 1]
        for i in range(1 << m)
    ]
    return [Fraction(0), *powers, *normals[:-1]]  # the last, 1.5 * 2^15, is the code of infinity


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def nearest(value: Fraction, grid: list[Fraction], ties: str) -> Fraction:
    """The entry of the ascending grid nearest to value >= 0; ties to the even index, or upwards."""
    above = bisect_right(grid, value)
    if above == len(grid):
        return grid[-1]
    low, high = grid[above - 1], grid[above]
    if value - low != high - value:
        return low if value - low < high - value else high
    return low if ties == "even" and (above - 1) % 2 == 0 else high


def mx_scale(amax: Fraction, name: str, rule: str) -> int:
    """The exponent s of a block's scale."""
    if amax == 0:
        return -127
    _, mantissa_bits, emax, largest = MX_ELEMENTS[name]
    exponent = floor_log2(amax)
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


def mx_block(values: list[float], name: str, rule: str, ties: str = "even") -> np.ndarray:
    """One block, in float32."""
    if not all(map(math.isfinite, values)):
        return np.full(len(values), np.nan, dtype=np.float32)
    magnitudes = [Fraction(abs(value)) for value in values]
    scale = Fraction(2) ** mx_scale(max(magnitudes), name, rule)
    grid = mx_magnitudes(name)
    rounded = [
        math.copysign(float(nearest(magnitude / scale, grid, ties) * scale), value)
        for magnitude, value in zip(magnitudes, values, strict=True)
    ]
    with np.errstate(over="ignore"):
        return np.array(rounded, dtype=np.float64).astype(np.float32)


def hif8(value: float, *, saturate: bool = True) -> float:
    """One value; ties away from zero, and no negative zero."""
    if math.isnan(value):
        return math.nan
    if math.isinf(value) or abs(Fraction(value)) >= 40960:
        return math.copysign(32768.0 if saturate else math.inf, value)
    magnitude = float(nearest(abs(Fraction(value)), hif8_magnitudes(), "away"))
    return math.copysign(magnitude, value) if magnitude else 0.0
