"""The distribution of a tensor from the counts of its values: bars, quantiles, Q-Q points.

Nothing is sampled. Bars begin at 1, 1.25, 1.5 and 1.75 times each power of two, so that all bars of an octave hold the
same number of values of a binary format, and no comb appears that is not in the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.capture.statistics.histogram import Histogram

#: Bars per octave.
_PER_OCTAVE = 4


@dataclass(frozen=True)
class Bars:
    """Fractions of the finite elements by magnitude."""

    #: Ascending bar edges, one more than bars.
    edges: list[float]
    #: The fraction of the finite elements in each bar, divided by the bar's width in octaves.
    positive: list[float]
    negative: list[float]


def magnitude_bars(counted: Histogram) -> Bars | None:
    """The bars from the smallest to the largest non-zero magnitude; None if there is none."""
    value, count = counted.values, counted.counts.to(torch.float64)
    nonzero = (value != 0) & (count > 0)
    if not bool(nonzero.any()):
        return None
    share = count[nonzero] / count.sum()
    mantissa, exponent = torch.frexp(value[nonzero].abs())  # mantissa in [0.5, 1)
    bar = (exponent.to(torch.int64) - 1) * _PER_OCTAVE + ((mantissa * 2 - 1) * _PER_OCTAVE).to(
        torch.int64
    )
    first, last = int(bar.min()), int(bar.max())
    is_negative = (value[nonzero] < 0).to(torch.float64)
    width = last - first + 1
    edges = [edge_of(number) for number in range(first, last + 2)]
    octaves = torch.tensor(edges, dtype=torch.float64).log2().diff()

    def densities(weight: Tensor) -> list[float]:
        summed = torch.zeros(width, dtype=torch.float64).index_add_(0, bar - first, weight)
        return (summed / octaves).tolist()

    return Bars(edges, densities(share * (1 - is_negative)), densities(share * is_negative))


def edge_of(number: int) -> float:
    """The lower edge of a bar, relative to 1."""
    octave, quarter = divmod(number, _PER_OCTAVE)
    return math.ldexp(1 + quarter / _PER_OCTAVE, octave)


def quantiles(counted: Histogram, shares: Tensor, *, magnitudes: bool = False) -> Tensor:
    """The quantiles of the elements, float64, without interpolation (the next value in order).

    With `magnitudes` of |x| where it is not zero. Empty where there is no such element.
    """
    value, count = counted.values, counted.counts
    if magnitudes:
        value, order = value.abs().sort()
        count = count[order] * (value > 0)
    cumulative = count.cumsum(0)
    if not cumulative.numel() or not int(cumulative[-1]):
        return value.new_zeros(0)
    rank = (shares.to(torch.float64) * (cumulative[-1] - 1)).round().to(torch.int64)
    return value[torch.searchsorted(cumulative, rank, right=True)]


def normal_points(counted: Histogram, number: int) -> tuple[Tensor, Tensor]:
    """Q-Q points against a normal distribution: evenly spaced standard normal quantiles, and those of the data.

    The outermost are those of the smallest and the largest element, (i - 1/2) / n of n elements (Hazen).
    """
    cumulative = counted.counts.cumsum(0)
    n = int(cumulative[-1]) if cumulative.numel() else 0
    if not n:
        return counted.values.new_zeros(0), counted.values.new_zeros(0)
    reach = float(-torch.special.ndtri(torch.tensor(0.5 / n, dtype=torch.float64)))
    z = torch.linspace(-reach, reach, min(number, n), dtype=torch.float64)
    rank = (torch.special.ndtr(z) * n - 0.5).round().clamp(0, n - 1).to(torch.int64)
    z = torch.special.ndtri((rank.to(torch.float64) + 0.5) / n)
    return z, counted.values[torch.searchsorted(cumulative, rank, right=True)]
