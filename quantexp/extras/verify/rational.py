"""The formats in exact rational arithmetic, by an independent method: the nearest of all values.

This module imports nothing from `quantexp.formats`. It is the final reference of `quantexp verify`, and slow; `exact`
computes the same for whole tensors and is checked against it. The parameters are those of OCP MX v1.0 section 5.3 and
of the HiFloat8 paper (arXiv 2409.16626) section 3. A value is quantised by searching the nearest entry in the list of
all magnitudes, so there is neither a binade nor a magic constant. Where a format is defined by float32 operations (the
scales of NVFP4), numpy's float32 performs them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

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


def nearest(value: Fraction, grid: Sequence[Fraction], ties: str) -> Fraction:
    """The entry of the ascending grid nearest to value >= 0; ties go to the even index, or upwards."""
    above = bisect_right(grid, value)
    if above == len(grid):
        return grid[-1]
    low, high = grid[above - 1], grid[above]
    if value - low != high - value:
        return low if value - low < high - value else high
    return low if ties == "even" and (above - 1) % 2 == 0 else high


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


def mx_block(values: list[float], name: str, rule: str, ties: str = "even") -> Array:
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


def fp8(value: float, name: str, ties: str = "even", *, saturate: bool = True) -> float:
    """One value; a value that rounds to the next one after the largest overflows."""
    if math.isnan(value):
        return math.nan
    element, has_infinity = FP8_ELEMENTS[name]
    grid = mx_magnitudes(element)
    overflow = math.inf if has_infinity else math.nan
    beyond = 2 * grid[-1] - grid[-2]
    if math.isinf(value) or abs(Fraction(value)) >= beyond:
        magnitude = float(grid[-1]) if saturate else overflow
    else:
        rounded = nearest(abs(Fraction(value)), [*grid, beyond], ties)
        largest = float(grid[-1]) if saturate else overflow
        magnitude = largest if rounded == beyond else float(rounded)
    return math.copysign(magnitude, value)


def nv_block_scale(amax: np.float32, t: np.float32) -> np.float32:
    """E4M3, nearest even, of amax / 6 / t in float32, at least 2^-9 and at most 448."""
    with np.errstate(over="ignore"):
        ratio = amax / np.float32(6) / t
    grid = mx_magnitudes("mxfp8_e4m3")[1:]
    if not np.isfinite(ratio) or Fraction(float(ratio)) >= grid[-1]:
        return np.float32(448)
    return np.float32(
        float(max(grid[0], nearest(Fraction(float(ratio)), [Fraction(0), *grid], "even")))
    )


def nv_block(values: list[float], t: float = 1.0, ties: str = "even") -> Array:
    """One block of NVFP4 under the tensor scale t, in float32, with every operation rounded once."""
    x = np.array(values, dtype=np.float32)
    if not np.isfinite(x).all():
        return np.full(len(values), np.nan, dtype=np.float32)
    d = nv_block_scale(np.abs(x).max(), np.float32(t)) * np.float32(t)
    with np.errstate(over="ignore"):
        ratios = np.abs(x) / d
        grid = mx_magnitudes("mxfp4_e2m1")
        q = [float(nearest(Fraction(float(min(r, np.float32(99)))), grid, ties)) for r in ratios]
        result: Array = np.copysign(np.array(q, dtype=np.float32) * d, x)
        return result


def nv_block_exact(values: list[float], t: Fraction, ties: str = "even") -> Array:
    """One block of NVFP4 with only three roundings: two to a grid, and the last to float32."""
    magnitudes = [abs(Fraction(value)) for value in values]
    scales = mx_magnitudes("mxfp8_e4m3")
    b = max(scales[1], nearest(max(magnitudes) / 6 / t, scales, "even"))
    grid = mx_magnitudes("mxfp4_e2m1")
    y = [float(nearest(m / (b * t), grid, ties) * b * t) for m in magnitudes]
    with np.errstate(over="ignore"):
        result: Array = np.copysign(
            np.array(y).astype(np.float32), np.array(values, dtype=np.float32)
        )
        return result


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's integers (Salmon et al., SC 2011, section 3.3)."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right % 2**32, (left >> 32) ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def random_integer(index: int, seed: int, offset: int) -> int:
    """The number in [0, 2^24) for stochastic rounding of the element at this position."""
    number, word = divmod(index, 4)
    counter = (number % 2**32, number >> 32, offset % 2**32, offset >> 32)
    return philox4x32(counter, (seed % 2**32, seed >> 32))[word] >> 8


def stochastic(value: Fraction, grid: Sequence[Fraction], random: int) -> Fraction:
    """The entry of the ascending grid above value >= 0, or the one below; the last entry for values beyond it."""
    above = bisect_right(grid, value)
    if above == len(grid):
        return grid[-1]
    low, high = grid[above - 1], grid[above]
    share = (value - low) / (high - low)
    return high if random < math.floor(share * 2**24) else low
