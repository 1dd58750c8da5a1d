"""Checks the gold against rational arithmetic: `exact` is as trustworthy as this check."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify import cases, rational
from quantexp.extras.verify.draws import random_integers
from quantexp.extras.verify.exact import KINDS, Case, answer, to_bf16
from quantexp.extras.verify.tally import Tally

Array = NDArray[Any]

GOLD = "exact gold"
RATIONAL = "rational gold"
#: Stride over hard blocks; each threshold has three ulps around three points, so it is not a multiple of 3.
STRIDE = 61
_DRAW: dict[str, Any] = {"rounding": "stochastic", "seed": 2**63 + 5, "offset": 7}


def check_gold(fmt: str, tally: Tally) -> None:
    """A part of a format's hard cases, in Fractions and Python's integers."""
    kind, element = KINDS[fmt]
    where = (fmt, GOLD, RATIONAL)
    if kind == "mx":
        _check_mx(fmt, where, tally)
    elif kind == "nv":
        _check_nv(fmt, where, tally)
    elif kind == "flat":
        _check_flat(fmt, element, where, tally)
        _check_draws(fmt, element, where, tally)
    else:
        powers = np.exp2(np.arange(-149.0, 128))
        near = cases.random_bits(1 << 11)
        x = cases.around(np.concatenate([near[np.isfinite(near)], powers]))
        expected = np.array([_bf16(float(v)) for v in x], np.float32)
        tally.add(where, "quantise", expected, to_bf16(x), description="random values")


def _check_mx(fmt: str, where: tuple[str, str, str], tally: Tally) -> None:
    for rule in rational.SCALE_RULES:
        blocks = cases.hard_blocks(fmt, rule)[::STRIDE]
        for ties in ("even", "away"):
            expected = [rational.mx_block(b.tolist(), fmt, rule, ties) for b in blocks]
            case = Case(fmt, blocks, options={"scale_rule": rule, "rounding": ties})
            _add(where, np.stack(expected), case, tally)


def _check_nv(fmt: str, where: tuple[str, str, str], tally: Tally) -> None:
    """Exact arithmetic if the tensor scale is a power of two; else one float32 rounding per operation."""
    for t in (1.0, 2.0**-100, 0.37):
        blocks = cases.hard_nv_blocks(t)[::7]
        t32 = float(np.float32(t))
        for ties in ("even", "away"):
            expected = []
            for block in blocks:
                if math.frexp(t)[0] == 0.5:
                    expected.append(rational.nv_block_exact(block.tolist(), Fraction(t), ties))
                else:
                    expected.append(rational.nv_block(block.tolist(), t32, ties))
            options = {"rounding": ties, "amax": float(np.float32(2688 * t))}
            _add(where, np.stack(expected), Case(fmt, blocks, options=options), tally)


def _check_flat(fmt: str, element: str, where: tuple[str, str, str], tally: Tally) -> None:
    x = cases.hard_values(element)
    for saturate in (True, False):
        for ties in ("away",) if fmt == "hifp8" else ("even", "away"):
            expected = np.array([_flat(fmt, float(v), ties, saturate) for v in x], np.float32)
            options = {"rounding": ties, "saturate": saturate, "scaling": "none"}
            _add(where, expected, Case(fmt, x, options=options), tally)


def _add(where: tuple[str, str, str], expected: Array, case: Case, tally: Tally) -> None:
    tally.add(where, "quantise", expected, answer(case).values, case=case)


def _flat(fmt: str, value: float, ties: str, saturate: bool) -> float:
    if fmt == "hifp8":
        return rational.hif8(value, saturate=saturate)
    return rational.fp8(value, fmt, ties, saturate=saturate)


def _bf16(value: float) -> float:
    """A finite value rounded to multiples of its step: 2^-7 of its power of two, at least 2^-133."""
    if value == 0:
        return value
    magnitude = abs(Fraction(value))
    step = Fraction(2) ** max(rational.floor_log2(magnitude) - 7, -133)
    with np.errstate(over="ignore"):
        rounded = round(magnitude / step) * step  # of a Fraction, half to even
        largest = Fraction(2) ** 128
        return math.copysign(math.inf if rounded >= largest else float(rounded), value)


def _check_draws(fmt: str, element: str, where: tuple[str, str, str], tally: Tally) -> None:
    """Every decision and every random number of stochastic rounding."""
    x = cases.hard_fractions(element)
    x = x[: 1 << 11]
    seed, offset = int(_DRAW["seed"]), int(_DRAW["offset"])
    integers = [rational.random_integer(i, seed, offset) for i in range(len(x))]
    got = random_integers(len(x), seed, offset)
    description = f"the first {len(x)} random numbers"
    tally.add(
        where,
        "philox",
        np.array(integers, np.float32),
        got.astype(np.float32),
        description=description,
    )
    points = (
        rational.hif8_magnitudes()
        if fmt == "hifp8"
        else rational.mx_magnitudes(rational.FP8_ELEMENTS[fmt][0])
    )
    expected = [
        math.copysign(float(rational.stochastic(abs(Fraction(float(v))), points, r)), v)
        for v, r in zip(x, integers, strict=True)
    ]
    values = np.array(expected, np.float32)
    if fmt == "hifp8":
        values = np.where(values == 0, np.float32(0), values)
    _add(where, values, Case(fmt, x, options={**_DRAW, "scaling": "none"}), tally)
