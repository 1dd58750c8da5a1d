"""Magnitudes and codes of every element, and rounding of whole tensors to the nearest magnitude.

A lookup finds a value among the midpoints between neighbours, which float64 represents exactly, as it does every
float32 times a power of two: no exponent is read, and the only rounding is to the grid.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.rational import (
    FP8_ELEMENTS,
    MX_ELEMENTS,
    hif8_magnitudes,
    mx_magnitudes,
)

Array = NDArray[Any]
#: Maps an element's name, magnitudes (float64, including Inf and NaN) and whether to saturate to grid magnitudes.
Rounder = Callable[[str, Array, bool], Array]

#: All 256 codes of HiFloat8 with their values, transcribed from the paper.
HIF8_TABLE = Path(__file__).with_name("tables") / "hif8.csv"
#: Codes of NaN: E4M3 has one (and its negative), E5M2 three, HiFloat8 only the sign bit.
NAN_CODES = {"e4m3": (0x7F,), "e5m2": (0x7D, 0x7E, 0x7F), "hif8": (0x80,)}
#: The code of infinity, if there is one.
INF_CODES = {"e5m2": 0x7C, "hif8": 0x6F}
_MX_NAMES = {name.partition("_")[2]: name for name in MX_ELEMENTS}
_HAS_INFINITY = {name.partition("_")[2]: has for name, (_, has) in FP8_ELEMENTS.items()}
ELEMENTS = (*_MX_NAMES, "hif8")
_BITS = {"e2m3": 6, "e3m2": 6, "e2m1": 4}


@dataclass(frozen=True)
class Grid:
    """The finite magnitudes of an element in ascending order, float64."""

    magnitudes: Array
    #: The code of each.
    codes: Array
    #: The hypothetical next value after the largest, at the last spacing.
    beyond: float
    #: The result beyond the largest magnitude, without saturation.
    overflow: float
    sign_bit: int


@cache
def grid(element: str) -> Grid:
    """The grid of an element by its name."""
    magnitudes = hif8_magnitudes() if element == "hif8" else mx_magnitudes(_MX_NAMES[element])
    values = np.array([float(magnitude) for magnitude in magnitudes])
    if element == "hif8":
        by_value = {value: code for code, value in enumerate(_hif8_values()[:128])}
        codes = np.array([by_value[value] for value in values.tolist()], dtype=np.uint8)
    else:
        codes = np.arange(len(values), dtype=np.uint8)
    return Grid(
        magnitudes=values,
        codes=codes,
        beyond=49152.0 if element == "hif8" else 2 * values[-1] - values[-2],
        overflow=math.inf if element == "hif8" or _HAS_INFINITY.get(element) else math.nan,
        sign_bit=1 << (_BITS.get(element, 8) - 1),
    )


def _hif8_values() -> list[float]:
    with HIF8_TABLE.open() as file:
        return [float(row["value"]) for row in csv.DictReader(file)]


@cache
def code_values(element: str) -> Array:
    """The value of each code of an element, float32; NaN and Inf for their codes."""
    if element == "hif8":
        return np.array(_hif8_values(), dtype=np.float32)
    points = grid(element)
    half = np.full(points.sign_bit, np.nan, dtype=np.float32)
    half[points.codes] = points.magnitudes
    if element in INF_CODES:
        half[INF_CODES[element]] = np.inf
    return np.concatenate([half, -half])


def nearest(element: str, v: Array, saturate: bool, ties: str = "even") -> Array:
    """Magnitudes on the element's grid; a tie goes to the even multiple of the local step, or to the larger (`away`).

    `zero` means the magnitude below.

    NaN stays. Without saturation, a value that rounds to the one after the largest, or is beyond it, overflows.
    """
    if ties == "zero":
        return drawn(element, v, saturate, np.int64(1 << 24))
    points = _points(element, saturate)
    middles = (points[:-1] + points[1:]) / 2
    below = np.searchsorted(middles, v, side="left")
    at = np.minimum(below, len(middles) - 1)
    steps = np.diff(points)
    up = np.ones(len(middles), bool) if ties == "away" else points[:-1] / steps % 2 == 1
    index = below + ((middles[at] == v) & up[at])
    return _values(grid(element), points, index, v, saturate)


def drawn(element: str, v: Array, saturate: bool, random: Array | np.int64) -> Array:
    """The upper neighbour if the random integer is below floor(2^24 f), f the fraction of the step; else the lower.

    So it is always the lower one with 2^24 in the place of random integers.
    """
    points = _points(element, saturate)
    below = np.clip(np.searchsorted(points, v, side="right") - 1, 0, len(points) - 1)
    low = points[below]
    step = np.append(np.diff(points), np.inf)[below]
    with np.errstate(invalid="ignore"):
        share = np.where(np.isfinite(v), v - low, 0.0) / step
    index = below + (random < np.floor(share * 2.0**24))
    return _values(grid(element), points, index, v, saturate)


def _points(element: str, saturate: bool) -> Array:
    points = grid(element)
    return points.magnitudes if saturate else np.append(points.magnitudes, points.beyond)


def _values(grid: Grid, points: Array, index: Array, v: Array, saturate: bool) -> Array:
    q = points[index]
    if not saturate:
        q = np.where(index == len(points) - 1, grid.overflow, q)
    return np.where(np.isnan(v), np.nan, q)


def encoded(element: str, q: Array, negative: Array) -> Array:
    """The codes (uint8) of magnitudes on the grid, Inf and NaN, with signs; a NaN has no sign."""
    points = grid(element)
    at = np.searchsorted(points.magnitudes, np.where(np.isfinite(q), q, 0.0))
    codes = points.codes[at]
    if element in INF_CODES:
        codes = np.where(np.isinf(q), INF_CODES[element], codes)
    if element == "hif8":
        negative = negative & (q > 0)
    codes = codes | np.where(negative, points.sign_bit, 0).astype(np.uint8)
    if element in NAN_CODES:
        codes = np.where(np.isnan(q), NAN_CODES[element][-1], codes)
    return codes.astype(np.uint8)
