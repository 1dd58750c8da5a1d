"""The loss that random rounding of weights costs, in their gradients (LOTION, arXiv 2510.08757).

Rounded stochastically, a weight w between l and h has the variance (w - l) (h - w), and to second order a loss grows by
half the sum of the variances, each times the curvature c at its weight. The gradient of a multiple of it is added to
that of the loss, before the step:

    c = b2 c + (1 - b2) g^2             of the first step c = g^2
    g = g + strength / 2 c (l + h - 2 w)

The curvature is that of the empirical Fisher matrix, from gradients without the term: Adam's second moment has the term
in it, and both would grow together. All of it is elementwise in float64, each result rounded to float32 once.
"""

from __future__ import annotations

from torch import Tensor


def curvature(gradient: Tensor, before: Tensor | None, beta: float) -> Tensor:
    """The mean of squared gradients, float64; `before`: that of the last step, None in the first."""
    square = gradient.double().square_()
    return square if before is None else square.mul_(1 - beta).add_(before.double().mul_(beta))


def smoothed(gradient: Tensor, slopes: Tensor, of: Tensor, strength: float) -> Tensor:
    """The gradient with that of the term, float64; `of`: the curvature, float32."""
    return of.double().mul_(strength / 2).mul_(slopes).add_(gradient)
