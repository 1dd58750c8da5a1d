"""The values of a declared element, listed one by one from its definition; the independent half of `gold`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from quantexp.extras.verify.rational import floor_log2, hif8_magnitudes


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
