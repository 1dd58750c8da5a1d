"""The exact gold: a format in rational arithmetic, from its definition alone, by the nearest of all values.

This module imports nothing from `quantexp.formats` but the lists and searches of `rational`; it reads the YAML keys
itself. An element is the list of its values, so there are neither binades nor bits. Where the family `grid` is defined
by float32 operations (see `quantexp.formats.declared.arithmetic`), numpy's float32 performs them. `of_table` has the
formats of the table, in the same keys.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.declared_values import (
    Values,
    bias_of,
    element_values,
    magnitudes_of,
)
from quantexp.extras.verify.rational import floor_log2, power_of_two_scale

Array = NDArray[Any]

_SMALLEST_FLOAT32_SCALE = np.float32(2.0**-126)
#: Errors of two scales that differ by less are a tie, as their sums are float64.
_TIE = Fraction(1, 1 << 44)
_PARTS = 32


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
class Gold:
    """A definition, ready to compute."""

    element: Values
    #: Rows and elements of a block; None without blocks, no number for a whole row.
    block: tuple[int, int | None] | None
    scale: str
    rule: str
    tensor_scale: str
    target: Fraction
    #: Whether a tensor's scale multiplies, as in FP8 and HiF8, rather than divides.
    multiplies: bool
    #: What a block's amax may be brought to, and the error that decides: mse, mae or max.
    candidates: tuple[float, ...] = ()
    choose: str = "mse"
    #: Whether a block's amax is divided by the element's largest value before the scale of the tensor, as in NVFP4.
    largest_first: bool = False

    @cached_property
    def scales(self) -> list[Fraction]:
        """The positive values of block scales that are small floats, or bf16."""
        if self.scale == "bf16":
            steps = [Fraction(1 + Fraction(i, 128)) for i in range(128)]
            return [Fraction(2) ** e * step for e in range(-126, 128) for step in steps]
        match = re.fullmatch(r"u?e(\d+)m(\d+)", self.scale)
        assert match is not None
        e, m = int(match[1]), int(match[2])
        return magnitudes_of(e, m, bias_of(e), reserved=1)[1:]


def gold_of(content: Mapping[str, Any]) -> Gold:
    """The format of a definition that `declared_format` accepts."""
    element, is_plain = element_values(content["element"])
    block = content.get("block")
    extents: tuple[int, int | None] | None
    if block in (None, "tensor"):
        extents = None
    elif block == "row":
        extents = (1, None)
    else:
        extents = (1, block) if isinstance(block, int) else (block[0], block[1])
    scale = str(content.get("scale", "fp32" if extents is None else "e8m0"))
    scale = "e8m0" if scale == "power_of_two" else scale
    rule = str(content.get("scale_rule") or ("floor" if scale == "e8m0" else "exact"))
    is_hif8 = content["element"] == "hif8"
    target = Fraction(content.get("amax_target") or (15 if is_hif8 else element.largest))
    gold = Gold(
        element,
        extents,
        scale,
        rule,
        "",
        target,
        multiplies=extents is None and (is_plain or is_hif8),
    )
    if extents is None:
        of_tensor = scale
    else:
        of_tensor = {"power_of_two": "e8m0"}.get(
            str(content.get("tensor_scale")), str(content.get("tensor_scale") or "none")
        )
        if of_tensor != "none" and "amax_target" not in content:
            target = element.largest * gold.scales[-1]
    return replace(
        gold,
        tensor_scale=of_tensor,
        target=target,
        candidates=tuple(content.get("candidates") or ()),
        choose=str(content.get("choose") or "mse"),
    )


def of_table(name: str, *, saturate: bool = True, **changes: Any) -> Gold:
    """A format of the table, with `changes` to its definition.

    Without `saturate`, a value that rounds to the next one after the largest, or is beyond it, overflows.
    """
    gold = replace(gold_of({**TABLE[name], **changes}), largest_first=name == "nvfp4_e2m1")
    if saturate:
        return gold
    has_infinity = name in ("fp8_e5m2", "hifp8", "bf16")
    return replace(gold, element=gold.element.overflowing(math.inf if has_infinity else math.nan))


def quantised(
    gold: Gold,
    x_RN: Array,
    rounding: str,
    random_RN: Array | None = None,
    amax: float | None = None,
) -> Array:
    """x (float32, blocks along the last axis) on the format's grid, float32.

    `random_RN` is for stochastic rounding; `amax` replaces that of x in the scale of the tensor.
    """
    t = _tensor_scale(gold, x_RN, amax)
    y = np.empty_like(x_RN)
    if gold.block is None:
        y[...] = _flat(gold, x_RN, t, rounding, random_RN)
        return y
    rows, extent = gold.block[0], gold.block[1] or max(1, x_RN.shape[1])
    for r in range(0, x_RN.shape[0], rows):
        for n in range(0, x_RN.shape[1], extent):
            at = slice(r, r + rows), slice(n, n + extent)
            part = None if random_RN is None else random_RN[at]
            y[at] = _block(gold, x_RN[at], t, rounding, part)
    return y


def scale_values(gold: Gold) -> list[float]:
    """Some block scales: the smallest, the largest, and those between."""
    if gold.scale == "e8m0":
        return [2.0**e for e in (-127, -126, -60, -9, 0, 1, 40, 126, 127)]
    if gold.scale == "fp32":
        return [2.0**-126, 1e-30, 0.37, 1.0, 3.0, 1e30]
    scales = gold.scales
    return [float(scales[i * (len(scales) - 1) // 8]) for i in range(9)]


def _tensor_scale(gold: Gold, x: Array, own_amax: float | None) -> np.float32 | None:
    if gold.tensor_scale == "none":
        return None
    finite = np.abs(x[np.isfinite(x)])
    own = float(finite.max()) if finite.size else 0.0
    amax = Fraction(own if own_amax is None else own_amax)
    if amax == 0:
        return np.float32(1)
    ratio = gold.target / amax if gold.multiplies else amax / gold.target
    if gold.tensor_scale == "e8m0":
        exponent = floor_log2(gold.target / amax)
        value = Fraction(2) ** exponent
        value = value if gold.multiplies else 1 / value
    else:
        value = ratio
    least = Fraction(2) ** -126
    if gold.block is not None:
        least /= gold.scales[0]
    value = min(max(value, least), Fraction(2) ** 127)
    return np.float32(_float32(value))


def _flat(gold: Gold, x: Array, t: np.float32 | None, rounding: str, random: Array | None) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        one = np.float32(1) if t is None else t
        v = x * one if gold.multiplies else x / one
        q = _rounded(gold.element, v, rounding, random)
        y: Array = q / one if gold.multiplies else q * one
    return y


def _block(
    gold: Gold, x: Array, t: np.float32 | None, rounding: str, random: Array | None
) -> Array:
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan)
    amax = np.float32(np.abs(x).max())
    with np.errstate(over="ignore", under="ignore"):
        factors = [b if t is None else b * t for b in _block_scales(gold, amax, t)]
        d = factors[0] if len(factors) == 1 else _best(gold, x, factors)
        y: Array = _rounded(gold.element, x / d, rounding, random) * d
    return y


def _block_scales(gold: Gold, amax: np.float32, t: np.float32 | None) -> list[np.float32]:
    """The scale of a block, or those among which it is chosen."""
    largest = np.float32(float(gold.element.largest))
    if gold.largest_first:
        over = amax / largest
        return [_on_scales(gold, over if t is None else over / t, gold.rule)]
    ratio = amax if t is None else amax / t
    if gold.candidates:
        overs = [np.float32(ratio / np.float32(c)) for c in gold.candidates]
        return [_on_scales(gold, over, gold.rule) for over in overs]
    if gold.scale == "e8m0":
        if gold.rule == "search":
            first = _power(gold, ratio, "rceil")
            return [np.float32(2.0 ** max(first - k, -127)) for k in range(3)]
        return [np.float32(2.0 ** _power(gold, ratio, gold.rule))]
    over = np.float32(ratio / largest)
    if gold.rule == "search":
        factors = [np.float32((_PARTS - k) / _PARTS) for k in range(_PARTS // 2 + 1)]
        return [_on_scales(gold, over * factor, "exact") for factor in factors]
    return [_on_scales(gold, over, gold.rule)]


def _power(gold: Gold, ratio: np.float32, rule: str) -> int:
    """The exponent of a power-of-two scale."""
    element = gold.element
    return power_of_two_scale(Fraction(float(ratio)), element.largest, element.mantissa_bits, rule)


def _on_scales(gold: Gold, over: np.float32, rule: str) -> np.float32:
    if gold.scale == "fp32":
        return np.float32(1) if over == 0 else max(over, _SMALLEST_FLOAT32_SCALE)
    scales = gold.scales
    if not np.isfinite(over) or Fraction(float(over)) >= scales[-1]:
        return np.float32(float(scales[-1]))
    value = Fraction(float(over))
    above = bisect_right(scales, value)
    if above == 0:
        return np.float32(float(scales[0]))
    low, high = scales[above - 1], scales[min(above, len(scales) - 1)]
    if value == low or rule == "floor":
        chosen = low
    elif rule == "ceil":
        chosen = high
    elif 2 * value == low + high:
        # The code of `low` is even: the first small float has the code 1, the first normal bf16 an even one.
        is_even = (above - 1 + (gold.scale != "bf16")) % 2 == 0
        chosen = low if is_even else high
    else:
        chosen = low if 2 * value < low + high else high
    return np.float32(float(chosen))


def _best(gold: Gold, x: Array, factors: Sequence[np.float32]) -> np.float32:
    """The first factor with the least error, or one that is as good in float64."""
    errors = []
    for d in factors:
        y = _rounded(gold.element, x / d, "even", None) * d
        if not np.isfinite(y).all():
            continue
        pairs = zip(x.flat, y.flat, strict=True)
        distances = [abs(Fraction(float(a)) - Fraction(float(b))) for a, b in pairs]
        if gold.choose == "mse":
            distances = [distance**2 for distance in distances]
        errors.append((d, max(distances) if gold.choose == "max" else sum(distances, Fraction(0))))
    least = min((error for _, error in errors), default=Fraction(0))
    return next((d for d, error in errors if error <= least * (1 + _TIE)), factors[0])


def _rounded(element: Values, v: Array, rounding: str, random: Array | None) -> Array:
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
    if 2 * v != low + high:
        return low if 2 * v < low + high else high
    if rounding == "away":
        return outer
    if element.places:
        is_high = element.places[above] % 2 == 0 or element.places[above - 1] % 2 == 1
        return high if is_high else low
    return inner if inner / (high - low) % 2 == 0 else outer


def _float32(value: Fraction) -> float:
    """A positive number rounded once to float32, ties to even."""
    exponent = max(floor_log2(value), -126) - 23
    step = Fraction(2) ** exponent
    whole, rest = divmod(value, step)
    up = 2 * rest > step or (2 * rest == step and whole % 2 == 1)
    return float((whole + up) * step)
