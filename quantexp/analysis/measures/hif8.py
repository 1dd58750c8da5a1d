"""The HiFloat8 precision tiers that a tensor uses: its codes counted by exponent, after scaling.

The dot code of a value says how many mantissa bits are left beside its exponent E (docs/formats.md):

    |E| <= 3: 3 bits      4 .. 7: 2 bits      8 .. 15: 1 bit      -22 .. -16: none, powers of two alone
"""

from __future__ import annotations

import math
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from quantexp.capture.statistics.counts import Counts, of_exponents
from quantexp.formats import QuantSpec, encode
from quantexp.formats.codes import code_values
from quantexp.formats.table import HIF8
from quantexp.quant.step_state import Draw


class Tier(Enum):
    """Values with the same number of mantissa bits."""

    THREE = "3 mantissa bits"
    TWO = "2 mantissa bits"
    ONE = "1 mantissa bit"
    NONE = "powers of two only"


def tier_of(exponent: int) -> Tier:
    """The tier of the values 2^E .. 2^(E+1).

    Raises:
        ValueError: HiF8 has no value with this exponent.
    """
    if not HIF8.emin <= exponent <= HIF8.emax:
        raise ValueError(f"E must lie between {HIF8.emin} and {HIF8.emax}, got {exponent}")
    if exponent < -HIF8.emax:
        return Tier.NONE
    return Tier.THREE if abs(exponent) <= 3 else Tier.TWO if abs(exponent) <= 7 else Tier.ONE


def code_counts(
    x: Tensor, spec: QuantSpec, amax: Tensor | None = None, draw: Draw | None = None
) -> Counts:
    """The number of elements by the exponent of their code, without zeros, NaN and Inf."""
    if x.numel() == 0:
        return Counts()
    codes, _ = encode(x, spec, amax=amax, **(draw or Draw()))
    per_code = torch.bincount(codes.reshape(-1).long(), minlength=2 * HIF8.sign_bit).tolist()
    per_exponent = [0] * (HIF8.emax - HIF8.emin + 1)
    for count, exponent in zip(per_code, _exponents(), strict=True):
        if exponent is not None:
            per_exponent[exponent - HIF8.emin] += count
    return of_exponents(per_exponent, HIF8.emin)


def tier_shares(counts: Counts) -> dict[Tier, float]:
    """The fraction of the non-zero codes in each tier; NaN without any."""
    sums = dict.fromkeys(Tier, 0)
    for exponent, count in counts.items():
        if count:
            sums[tier_of(exponent)] += count
    total = counts.total
    return {tier: n / total if total else math.nan for tier, n in sums.items()}


@cache
def _exponents() -> tuple[int | None, ...]:
    """The exponent of each code; None for zero, Inf and NaN."""
    return tuple(
        math.frexp(value)[1] - 1 if value and math.isfinite(value) else None
        for value in code_values(HIF8)
    )
