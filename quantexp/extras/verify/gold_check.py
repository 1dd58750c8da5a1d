"""Checks `exact`, which computes whole tensors, against the gold: it is as trustworthy as this check."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify import cases
from quantexp.extras.verify.draws import random_integers
from quantexp.extras.verify.exact import KINDS, Case, answer, to_bf16
from quantexp.extras.verify.gold import of_table, quantised
from quantexp.extras.verify.rational import SCALE_RULES
from quantexp.extras.verify.tally import Tally

Array = NDArray[Any]

GOLD = "exact gold"
RATIONAL = "rational gold"
#: Stride over hard blocks; each threshold has three ulps around three points, so it is not a multiple of 3.
STRIDE = 61
_DRAW: dict[str, Any] = {"rounding": "stochastic", "seed": 2**63 + 5, "offset": 7}


def check_gold(fmt: str, tally: Tally) -> None:
    """A part of a format's hard cases, in Fractions."""
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
        expected = quantised(of_table(fmt, saturate=False), x[None], "even")[0]
        tally.add(where, "quantise", expected, to_bf16(x), description="random values")


def _check_mx(fmt: str, where: tuple[str, str, str], tally: Tally) -> None:
    for rule in SCALE_RULES:
        blocks = cases.hard_blocks(fmt, rule)[::STRIDE]
        for ties in ("even", "away", "zero"):
            expected = quantised(of_table(fmt, scale_rule=rule), blocks, ties)
            _add(
                where,
                expected,
                Case(fmt, blocks, options={"scale_rule": rule, "rounding": ties}),
                tally,
            )


def _check_nv(fmt: str, where: tuple[str, str, str], tally: Tally) -> None:
    for t in (1.0, 2.0**-100, 0.37):
        blocks = cases.hard_nv_blocks(t)[::7]
        amax = float(np.float32(2688 * t))
        for ties in ("even", "away", "zero"):
            expected = quantised(of_table(fmt), blocks, ties, amax=amax)
            _add(
                where, expected, Case(fmt, blocks, options={"rounding": ties, "amax": amax}), tally
            )


def _check_flat(fmt: str, element: str, where: tuple[str, str, str], tally: Tally) -> None:
    x = cases.hard_values(element)
    for saturate in (True, False):
        gold = of_table(fmt, saturate=saturate, scale="none")
        for ties in (
            *(("away",) if fmt == "hifp8" else ("even", "away")),
            *(("zero",) if saturate else ()),
        ):
            options = {"rounding": ties, "saturate": saturate, "scaling": "none"}
            _add(where, quantised(gold, x[None], ties)[0], Case(fmt, x, options=options), tally)


def _check_draws(fmt: str, element: str, where: tuple[str, str, str], tally: Tally) -> None:
    """Every decision of stochastic rounding; the tests hold the random numbers against known answers."""
    x = cases.hard_fractions(element)[: 1 << 11]
    integers = random_integers(len(x), int(_DRAW["seed"]), int(_DRAW["offset"]))
    expected = quantised(of_table(fmt, scale="none"), x[None], "stochastic", integers[None])[0]
    _add(where, expected, Case(fmt, x, options={**_DRAW, "scaling": "none"}), tally)


def _add(where: tuple[str, str, str], expected: Array, case: Case, tally: Tally) -> None:
    tally.add(where, "quantise", expected, answer(case).values, case=case)
