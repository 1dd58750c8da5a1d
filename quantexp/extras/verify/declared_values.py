"""The values of a declared element, listed one by one from its definition; the independent half of `gold`."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.rational import floor_log2, hif8_magnitudes

Array = NDArray[Any]

#: The formats of the table, as the definitions that they would have.
TABLE: Mapping[str, Mapping[str, Any]] = {
    "mxfp8_e4m3": {"element": "e4m3", "block": 32},
    "mxfp8_e5m2": {"element": "e5m2", "block": 32},
    "mxfp6_e2m3": {"element": "e2m3", "block": 32},
    "mxfp6_e3m2": {"element": "e3m2", "block": 32},
    "mxfp4_e2m1": {"element": "e2m1", "block": 32},
    "nvfp4_e2m1": {"element": "e2m1", "block": 16, "scale": "e4m3", "tensor_scale": "fp32"},
    "fp8_e4m3": {"element": "e4m3"},
    "fp8_e5m2": {"element": "e5m2"},
    "hifp8": {"element": "hif8", "scale": "none"},
    "bf16": {
        "element": {"exponent_bits": 8, "mantissa_bits": 7, "infinity": True},
        "scale": "none",
    },
}


@dataclass(frozen=True)
class Values:
    """The finite values of an element, ascending."""

    values: tuple[Fraction, ...]
    #: What a block's amax is brought to: the largest magnitude that both signs reach.
    largest: Fraction
    #: For the rule `even`.
    mantissa_bits: int
    #: Whether a negative number that rounds to zero becomes -0.
    has_negative_zero: bool = True
    #: Of a list, the place of each value for ties to even; without it the even multiple of the step wins.
    places: tuple[int, ...] = ()
    #: What the first and the last value stand for, if they are those beyond the finite ones.
    overflow: float | None = None
    #: Whether the spacing of values also grows towards the largest, as in HiFloat8.
    is_tapered: bool = False

    def overflowing(self, overflow: float) -> Values:
        """The element with the value after the largest, of either sign, which stands for `overflow`."""
        above = (
            self.largest * Fraction(3, 2) if self.is_tapered else 2 * self.largest - self.values[-2]
        )
        return replace(self, values=(-above, *self.values, above), overflow=overflow)


def element_values(content: object) -> tuple[Values, bool]:
    """The values of an element, and whether it is a float or an integer of which both signs are alike."""
    if content == "hif8":
        hif8 = _signed(list(hif8_magnitudes()), 3, has_negative_zero=False)
        return replace(hif8, is_tapered=True), False
    if isinstance(content, str) and (match := re.fullmatch(r"e(\d+)m(\d+)", content)):
        e, m = int(match[1]), int(match[2])
        reserved = {"e4m3": 1, "e5m2": 1 << m}.get(content, 0)
        return _signed(magnitudes_of(e, m, bias_of(e), reserved), m), True
    if isinstance(content, str):
        bits = int(content.removeprefix("int"))
        return _signed([Fraction(i) for i in range(1 << (bits - 1))], bits - 1), True
    assert isinstance(content, Mapping)
    if "values" in content:
        return _list(content["values"]), False
    if "integer_bits" in content:
        bits, step = content["integer_bits"], Fraction(content.get("step", 1))
        magnitudes = [i * step for i in range(1 << (bits - 1))]
        if content.get("symmetric", True):
            return _signed(magnitudes, bits - 1), True
        element = _signed(magnitudes, bits - 1)
        lowest = -step * (1 << (bits - 1))
        return Values((lowest, *element.values), element.largest, bits - 1), False
    e, m = content["exponent_bits"], content["mantissa_bits"]
    bias = content.get("bias")
    has_negative_zero = content.get("negative_zero", True)
    reserved = 0
    if content.get("infinity"):
        reserved = 1 << m
    elif content.get("nan") and has_negative_zero:
        reserved = 1
    magnitudes = magnitudes_of(e, m, bias_of(e) if bias is None else bias, reserved)
    element = _signed(magnitudes, m, has_negative_zero=has_negative_zero)
    is_plain = has_negative_zero and floor_log2(element.largest) + 24 - m <= 127
    return element, is_plain


def bias_of(exponent_bits: int) -> int:
    """The bias without one in the definition."""
    return 2 ** (exponent_bits - 1) - 1 if exponent_bits else 0


def magnitudes_of(e: int, m: int, bias: int, reserved: int) -> list[Fraction]:
    """The value of each code without its sign; the last codes are reserved."""
    values = []
    for code in range((1 << (e + m)) - reserved):
        field, mantissa = divmod(code, 1 << m)
        significand = Fraction(mantissa, 1 << m) + (field > 0)
        values.append(significand * Fraction(2) ** (max(field, 1) - bias))
    return values


def _signed(
    magnitudes: list[Fraction], mantissa_bits: int, *, has_negative_zero: bool = True
) -> Values:
    negative = [-value for value in reversed(magnitudes[1:])]
    values = (*negative, *magnitudes)
    return Values(values, magnitudes[-1], mantissa_bits, has_negative_zero)


def _list(content: Sequence[float]) -> Values:
    values = sorted(Fraction(float(np.float32(value))) for value in content)
    negative, rest = [v for v in values if v < 0], [v for v in values if v >= 0]
    start = 0 if rest and rest[0] == 0 else 1
    places = (*range(len(negative), 0, -1), *range(start, start + len(rest)))
    has_both_signs = values[0] < 0 < values[-1]
    largest = (min if has_both_signs else max)(abs(values[0]), abs(values[-1]))
    return Values(tuple(values), largest, 0, has_negative_zero=False, places=places)


def rounded(element: Values, v: Array, rounding: str, random: Array | None) -> Array:
    """Each number of v on the grid, float32; NaN stays."""
    draws = np.zeros(v.size, np.int64) if random is None else random.reshape(-1)
    results = [
        on_grid(element, float(one), rounding, int(draw))
        for one, draw in zip(v.reshape(-1), draws, strict=True)
    ]
    return np.array(results, np.float32).reshape(v.shape)


def on_grid(element: Values, v: float | Fraction, rounding: str, random: int = 0) -> float:
    """The value of an element that v is rounded to; `random` decides if rounding is stochastic. NaN stays."""
    if math.isnan(v):
        return math.nan
    values = element.values
    is_low = v == -math.inf or (math.isfinite(v) and Fraction(v) <= values[0])
    is_high = v == math.inf or (math.isfinite(v) and Fraction(v) >= values[-1])
    if is_low or is_high:
        chosen = values[0] if is_low else values[-1]
    else:
        exact = Fraction(v)
        above = bisect_right(values, exact)
        chosen = _beside(element, exact, above, rounding, random)
    if element.overflow is not None and abs(chosen) == values[-1]:
        return math.copysign(element.overflow, v)
    if chosen == 0 and element.has_negative_zero:
        return math.copysign(0.0, v)
    return float(chosen)


def _beside(element: Values, v: Fraction, above: int, rounding: str, random: int) -> Fraction:
    """The value below or above v."""
    low, high = element.values[above - 1], element.values[above]
    inner, outer = (high, low) if low + high < 0 else (low, high)
    if rounding == "stochastic":
        share = abs(v - inner) / (high - low)
        return outer if random < math.floor(share * 2**24) else inner
    if rounding == "zero":
        return outer if v == outer else inner
    if 2 * v != low + high:
        return low if 2 * v < low + high else high
    if rounding == "away":
        return outer
    if element.places:
        is_high = element.places[above] % 2 == 0 or element.places[above - 1] % 2 == 1
        return high if is_high else low
    return inner if inner / (high - low) % 2 == 0 else outer
