"""Rounding to a power-of-two spacing, by the floating-point adder.

In float32, numbers from 2^k to 2^(k+1) are 2^(k-23) apart. With C = 1.5 * 2^k, v + C is therefore v rounded to a
multiple of 2^(k-23), to nearest even, and (v + C) - C is exact. The callers choose k for each value; where the element
is subnormal, k does not depend on the exponent of v.

Nearest away sets the lowest bit of v first. A tie has that bit clear, so it moves just above itself; ties are even in
units of that bit, so no other value crosses one.

Stochastic rounding takes a random integer r in [0, 2^24) for each value. With f the distance of v from the multiple of
the spacing below it, in units of the spacing, v is rounded up if r < floor(2^24 f), and down otherwise: the probability
of rounding up is f, truncated to 24 bits. All steps are exact in float32. Values beyond the largest one still saturate,
which no rounding makes unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.bits import EXPONENT_WORD, MANTISSA_BITS, as_bits
from quantexp.formats.philox import RANDOM_BITS
from quantexp.formats.types import Element, Rounding


def break_ties(v: Tensor, rounding: Rounding) -> None:
    """Modify v (float32, in place) so that rounding to nearest even then breaks ties as required.

    Signs are kept. Zero becomes the smallest subnormal, which rounds to zero; Inf becomes NaN.
    """
    if rounding is Rounding.AWAY:
        as_bits(v).bitwise_or_(1)


def round_element(
    v: Tensor, element: Element, rounding: Rounding, random: Tensor | None, magic: Tensor
) -> None:
    """Round v >= 0 (float32, in place) to the element's grid; `magic` is a temporary of v's shape.

    The grid continues beyond the element's largest value. `random` has v's shape (see `philox`), and is required if
    rounding is stochastic.
    """
    if rounding is Rounding.STOCHASTIC:
        assert random is not None
        torch.bitwise_and(as_bits(v), EXPONENT_WORD, out=as_bits(magic))
        magic.clamp_min_(2.0**element.emin).mul_(2.0**-element.mantissa_bits)
        round_at_random(v, magic, random)
    else:
        break_ties(v, rounding)
        round_magnitudes(v, element, magic)


def round_at_random(v: Tensor, step: Tensor, random: Tensor) -> None:
    """Round v >= 0 (float32, in place) to multiples of `step`, powers of two; NaN stays NaN."""
    v.div_(step)
    below = v.floor()
    v.sub_(below).mul_(2.0**RANDOM_BITS).floor_()
    below.add_(random < v)
    torch.mul(below, step, out=v)


def round_to_multiples(v: Tensor, magic: Tensor, factor: float = 1.0) -> None:
    """Round v (float32, in place) to multiples of factor * magic / (1.5 * 2^23), nearest even; 0 is +0.

    factor * magic must be exact in float32, so that it does not matter whether it is rounded before it is added.
    """
    v.add_(magic, alpha=factor).sub_(magic, alpha=factor)


def round_magnitudes(v: Tensor, element: Element, magic: Tensor) -> None:
    """Round v >= 0 (float32, in place) to the element's grid, its subnormals included.

    The grid continues beyond the element's largest value. `magic` is a temporary of v's shape.
    """
    torch.bitwise_and(as_bits(v), EXPONENT_WORD, out=as_bits(magic))
    magic.clamp_min_(2.0**element.emin)
    round_to_multiples(v, magic, 1.5 * 2.0 ** (MANTISSA_BITS - element.mantissa_bits))
