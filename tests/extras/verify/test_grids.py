"""Whole tensors on an element's grid, against Fractions one value at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantexp.extras.verify import cases
from quantexp.extras.verify.declared_values import element_values, on_grid
from quantexp.extras.verify.grids import ELEMENTS, code_values, drawn, encoded, grid, nearest

elements = pytest.mark.parametrize("element", ELEMENTS)


def hard(element: str) -> np.ndarray:
    x = np.abs(cases.hard_values(element).astype(np.float64))
    return x[np.isfinite(x)]


@elements
@pytest.mark.parametrize("ties", ["even", "away"])
def test_nearest_is_that_of_fractions(element: str, ties: str) -> None:
    """HiFloat8's powers of two are not multiples of a common step: there even does not mean an even index."""
    if (element, ties) == ("hif8", "even"):
        x = np.array([1.0625, 1.1875, 4.25, 4.75, 3 * 2.0**-18, 1.5 * 2.0**-22, 2.0**-23])
        expected = [1.0, 1.25, 4.0, 5.0, 2.0**-16, 2.0**-21, 0.0]
    else:
        x = hard(element)
        expected = [on_grid(element_values(element)[0], float(v), ties) for v in x]
    assert nearest(element, x, True, ties).tolist() == expected


@elements
def test_drawn_is_that_of_fractions(element: str) -> None:
    x = np.abs(cases.hard_fractions(element)[:2000].astype(np.float64))
    random = np.random.default_rng(0).integers(0, 1 << 24, x.shape)
    random[::5], random[1::5] = 0, (1 << 24) - 1
    values, _ = element_values(element)
    expected = [
        on_grid(values, float(v), "stochastic", int(r)) for v, r in zip(x, random, strict=True)
    ]
    assert drawn(element, x, True, random).tolist() == expected


@pytest.mark.parametrize(("element", "beyond"), [("e4m3", 464.0), ("e5m2", 61440.0)])
def test_overflow_begins_where_the_next_value_would_be_nearer(element: str, beyond: float) -> None:
    it = grid(element)
    below = np.nextafter(beyond, 0)
    assert (
        nearest(element, np.array([below, 1e30, math.inf]), True).tolist()
        == [it.magnitudes[-1]] * 3
    )
    loose = nearest(element, np.array([below, beyond * 1.01, math.inf]), False)
    assert loose[0] == it.magnitudes[-1]
    assert loose[1:].tolist() == pytest.approx([it.overflow] * 2, nan_ok=True)


@elements
def test_every_finite_code_is_its_values_code(element: str) -> None:
    values = code_values(element)
    codes = np.arange(len(values), dtype=np.uint8)
    there = np.isfinite(values)
    results = encoded(element, np.abs(values[there]), np.signbit(values[there]))
    assert results.tolist() == codes[there].tolist()


def test_infinity_and_nan_have_the_codes_of_their_specification() -> None:
    q, negative = np.array([math.inf, math.inf, math.nan]), np.array([False, True, True])
    assert encoded("e5m2", q, negative).tolist() == [0x7C, 0xFC, 0x7F]
    assert encoded("hif8", q, negative).tolist() == [0x6F, 0xEF, 0x80]
    assert encoded("e4m3", q[2:], negative[2:]).tolist() == [0x7F]
    assert encoded("hif8", np.array([0.0]), np.array([True])).tolist() == [0]
