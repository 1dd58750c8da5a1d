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
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.declared_values import (
    TABLE,
    Values,
    bias_of,
    element_values,
    magnitudes_of,
    rounded,
)
from quantexp.extras.verify.gold_levels import correction, drawn_scale, with_micro_exponents
from quantexp.extras.verify.rational import floor_log2, power_of_two_scale

Array = NDArray[Any]

_SMALLEST_FLOAT32_SCALE = np.float32(2.0**-126)
#: Errors of two scales that differ by less are a tie, as their sums are float64.
_TIE = Fraction(1, 1 << 44)
_PARTS = 32
#: The macro block of a whole row.
_ROW = 1 << 40


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
    #: Elements that a block may take in place of the first.
    others: tuple[Values, ...] = ()
    #: Elements of groups within a block that have one bit of exponent each.
    micro_exponents: tuple[int, ...] = ()
    #: Elements whose blocks' scales share a correction.
    eden: int | None = None
    #: Elements that have the scale of a tensor by themselves.
    macro_block: int | None = None
    #: Whether a block's amax is divided by the element's largest value before the scale of the tensor, as in NVFP4.
    largest_first: bool = False

    @cached_property
    def scales(self) -> list[Fraction]:
        """The positive values of block scales that are small floats, or bf16."""
        if self.scale == "bf16":
            steps = [Fraction(1 + Fraction(i, 128)) for i in range(128)]
            return [Fraction(2) ** e * step for e in range(-126, 128) for step in steps]
        match = re.fullmatch(r"u?e(\d+)m(\d+)(?: bias (-?\d+))?", self.scale)
        assert match is not None
        e, m = int(match[1]), int(match[2])
        bias = bias_of(e) if match[3] is None else int(match[3])
        return magnitudes_of(e, m, bias, reserved=1)[1:]


def gold_of(content: Mapping[str, Any]) -> Gold:
    """The format of a definition that `declared_format` accepts."""
    several = content["element"]
    several = several if isinstance(several, list) else [several]
    element, is_plain = element_values(several[0])
    block = content.get("block")
    extents: tuple[int, int | None] | None
    if block in (None, "tensor"):
        extents = None
    elif block == "row":
        extents = (1, None)
    else:
        extents = (1, block) if isinstance(block, int) else (block[0], block[1])
    scale = content.get("scale", "fp32" if extents is None else "e8m0")
    if isinstance(scale, Mapping):
        scale = "e{exponent_bits}m{mantissa_bits} bias {bias}".format(**scale)
    scale = str(scale)
    scale = "e8m0" if scale == "power_of_two" else scale
    rule = str(content.get("scale_rule") or ("floor" if scale == "e8m0" else "exact"))
    is_hif8, macro = content["element"] == "hif8", content.get("macro_block")
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
            levels = len(content.get("micro_exponents") or ())
            target = element.largest * 2**levels * (1 if scale == "e8m0" else gold.scales[-1])
    return replace(
        gold,
        tensor_scale=of_tensor,
        target=target,
        candidates=tuple(content.get("candidates") or ()),
        choose=str(content.get("choose") or "mse"),
        others=tuple(element_values(each)[0] for each in several[1:]),
        micro_exponents=tuple(content.get("micro_exponents") or ()),
        eden=content.get("eden"),
        macro_block=_ROW if macro == "row" else macro,
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
    y = np.empty_like(x_RN)
    if gold.macro_block is not None:
        inner, size = replace(gold, macro_block=None), max(1, min(gold.macro_block, x_RN.shape[1]))
        for r, n in product(range(x_RN.shape[0]), range(0, x_RN.shape[1], size)):
            at = slice(r, r + 1), slice(n, n + size)
            part = None if random_RN is None else random_RN[at]
            is_finite = np.isfinite(x_RN[at]).all()
            y[at] = quantised(inner, x_RN[at], rounding, part) if is_finite else np.nan
        return y
    t = _tensor_scale(gold, x_RN, amax)
    if gold.block is None:
        y[...] = _flat(gold, x_RN, t, rounding, random_RN)
        return y
    rows, extent = gold.block[0], gold.block[1] or max(1, x_RN.shape[1])
    for r in range(0, x_RN.shape[0], rows):
        for n in range(0, x_RN.shape[1], gold.eden or extent):
            at = slice(r, r + rows), slice(n, n + (gold.eden or extent))
            part = None if random_RN is None else random_RN[at]
            make = _corrected if gold.eden else _block
            y[at] = make(gold, x_RN[at], t, rounding, part)
    return y


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
    if gold.block is not None and gold.scale != "e8m0":
        least /= gold.scales[0]
    value = min(max(value, least), Fraction(2) ** 127)
    return np.float32(_float32(value))


def _flat(gold: Gold, x: Array, t: np.float32 | None, rounding: str, random: Array | None) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        one = np.float32(1) if t is None else t
        v = x * one if gold.multiplies else x / one
        q = rounded(gold.element, v, rounding, random)
        y: Array = q / one if gold.multiplies else q * one
    return y


def _block(
    gold: Gold, x: Array, t: np.float32 | None, rounding: str, random: Array | None
) -> Array:
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan)
    amax = np.float32(np.abs(x).max())
    with np.errstate(over="ignore", under="ignore"):
        element, b = _taken(gold, x, amax, t)
        d = with_micro_exponents(x, b if t is None else b * t, element, gold.micro_exponents)
        y: Array = rounded(element, x / d, rounding, random) * d
    return y


def _corrected(
    gold: Gold, x: Array, t: np.float32 | None, rounding: str, random: Array | None
) -> Array:
    """Blocks whose scales share a correction, one after another in a row."""
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan)
    assert gold.block is not None
    assert gold.block[1] is not None
    parts, y = [], np.empty_like(x)
    with np.errstate(over="ignore", under="ignore"):
        for n in range(0, x.shape[1], gold.block[1]):
            at = slice(None), slice(n, n + gold.block[1])
            element, b = _taken(gold, x[at], np.float32(np.abs(x[at]).max()), t)
            v = x[at] / (b if t is None else b * t)
            ties = "even" if rounding == "stochastic" else rounding
            parts.append((at, b, v, rounded(element, v, ties, None)))
        limit = 2 * max(element.largest for element in (gold.element, *gold.others))
        pairs = [(v, q) for _, _, v, q in parts]
        c = correction(pairs, limit, gold.eden or 0)
        for at, b, _, q in parts:
            target = np.float32(b * c)
            if random is None or gold.scale == "fp32":
                own = _on_scales(gold, target, "exact")
            else:
                own = drawn_scale(gold.scales, target, int(random[at][0, 0]))
            y[at] = q * (own if t is None else own * t)
    return y


def _taken(
    gold: Gold, x: Array, amax: np.float32, t: np.float32 | None
) -> tuple[Values, np.float32]:
    """The element and the scale of a block: the first with the least error."""
    tried = [
        (element, b)
        for element in (gold.element, *gold.others)
        for b in _block_scales(gold, element, amax, t)
    ]
    return tried[0] if len(tried) == 1 else _best(gold, x, tried, t)


def _block_scales(
    gold: Gold, element: Values, amax: np.float32, t: np.float32 | None
) -> list[np.float32]:
    """The scale of a block, or those among which it is chosen."""
    largest = np.float32(float(element.largest))
    if gold.largest_first:
        over = amax / largest
        return [_on_scales(gold, over if t is None else over / t, gold.rule)]
    ratio = (amax if t is None else amax / t) * np.float32(2.0 ** -len(gold.micro_exponents))
    if gold.candidates:
        overs = [np.float32(ratio / np.float32(c)) for c in gold.candidates]
        return [_on_scales(gold, over, gold.rule) for over in overs]
    if gold.scale == "e8m0":
        if gold.rule == "search":
            first = _power(element, ratio, "rceil")
            return [np.float32(2.0 ** max(first - k, -127)) for k in range(3)]
        return [np.float32(2.0 ** _power(element, ratio, gold.rule))]
    over = np.float32(ratio / largest)
    if gold.rule == "search":
        factors = [np.float32((_PARTS - k) / _PARTS) for k in range(_PARTS // 2 + 1)]
        return [_on_scales(gold, over * factor, "exact") for factor in factors]
    return [_on_scales(gold, over, gold.rule)]


def _power(element: Values, ratio: np.float32, rule: str) -> int:
    """The exponent of a power-of-two scale."""
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


def _best(
    gold: Gold, x: Array, tried: Sequence[tuple[Values, np.float32]], t: np.float32 | None
) -> tuple[Values, np.float32]:
    """The first element and scale with the least error, or with one that is as good in float64."""
    errors = []
    for element, b in tried:
        d = b if t is None else b * t
        y = rounded(element, x / d, "even", None) * d
        if not np.isfinite(y).all():
            continue
        pairs = zip(x.flat, y.flat, strict=True)
        distances = [abs(Fraction(float(a)) - Fraction(float(b))) for a, b in pairs]
        if gold.choose == "mse":
            distances = [distance**2 for distance in distances]
        error = max(distances) if gold.choose == "max" else sum(distances, Fraction(0))
        errors.append(((element, b), error))
    least = min((error for _, error in errors), default=Fraction(0))
    return next((one for one, error in errors if error <= least * (1 + _TIE)), tried[0])


def _float32(value: Fraction) -> float:
    """A positive number rounded once to float32, ties to even."""
    exponent = max(floor_log2(value), -126) - 23
    step = Fraction(2) ** exponent
    whole, rest = divmod(value, step)
    up = 2 * rest > step or (2 * rest == step and whole % 2 == 1)
    return float((whole + up) * step)
