"""Error, squared bias and variance of a gradient, from sums over batches and draws.

For a batch k of n, and a draw d of m of the random numbers of the rounding, r_k is the gradient in fp32 and g_kd that
under a scheme. The error e_kd = g_kd - r_k has a mean over batches and draws, the bias b. With e_k the mean of e_kd
over the draws,

    error       E |e|^2     the mean of |e_kd|^2
    bias        |b|^2       the mean of e_k . e_l over all pairs of batches k != l,
                            (|sum e_k|^2 - sum |e_k|^2) / (n (n - 1))
    draws       the variance that the random numbers give to a batch, summed over the elements:
                            the mean over k of (mean over d of |e_kd|^2 - |e_k|^2) m / (m - 1)
    variance    the rest, error - bias: how e changes from batch to batch and from draw to draw

The obvious estimate |mean e_kd|^2 counts a share 1 / (n m) of the variance as bias. Two batches have errors that do not
depend on each other, so the mean of a product of two of them is |b|^2 exactly: the estimate is unbiased, and the one of
the least variance of those that are (a U-statistic; Hoeffding, Annals of Mathematical Statistics 19, 1948). It may
therefore be below zero. Two draws of one batch share what the batch does to the error, and are no such pair.

All are divided by the mean of |r_k|^2, so that error = bias + variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from quantexp.training.gradients import Sums


class Estimates(TypedDict):
    """Of a group of parameters, relative to the mean square of the gradient in fp32; null where not finite."""

    error2: float | None
    bias2: float | None
    #: None with one draw.
    draws2: float | None
    #: Of the angle to the gradient in fp32, the mean over batches and draws.
    cosine: float | None


@dataclass
class Tally:
    """Sums over the elements of a group."""

    #: Of each batch and draw; the draws of a batch follow each other.
    each: list[Sums] = field(default_factory=list)
    #: |e_k|^2 of each batch.
    squares: list[float] = field(default_factory=list)
    #: |sum e_k|^2.
    total: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        """Of both groups together."""
        if not self.each:
            return other
        return Tally(
            [a + b for a, b in zip(self.each, other.each, strict=True)],
            [a + b for a, b in zip(self.squares, other.squares, strict=True)],
            self.total + other.total,
        )


def estimates_of(tally: Tally) -> Estimates:
    """The estimates of a group; at least two batches."""
    number = len(tally.each)
    draws = number // len(tally.squares)
    norm = math.fsum(sums.reference for sums in tally.each) / number
    error = math.fsum(sums.difference for sums in tally.each) / number
    of_batch = math.fsum(tally.squares) / len(tally.squares)
    of_draws = None if draws == 1 else (error - of_batch) * draws / (draws - 1)
    return {
        "error2": _relative(error, norm),
        "bias2": _relative(mean_product(tally.squares, tally.total), norm),
        "draws2": None if of_draws is None else _relative(of_draws, norm),
        "cosine": finite(math.fsum(sums.cosine for sums in tally.each) / number),
    }


def mean_product(squares: list[float], total: float) -> float:
    """The mean of x_k . x_l over all pairs k != l, from |x_k|^2 of each and |sum x_k|^2."""
    number = len(squares)
    return (total - math.fsum(squares)) / (number * (number - 1))


def _relative(value: float, norm: float) -> float | None:
    return finite(value / norm) if norm else None


def finite(value: float) -> float | None:
    """The value, or None if it is NaN or Inf."""
    return value if math.isfinite(value) else None
