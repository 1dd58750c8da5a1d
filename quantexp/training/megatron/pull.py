"""Weights that are pulled towards their values in a format (CAGE, arXiv 2510.18784, decoupled from the optimizer).

Straight-through training looks for a minimum of the loss of rounded weights; CAGE for one at which the distance of a
weight from its rounded value counts, too. After the step of the optimizer, whose rate is lr,

    w = w - lr s (w - round(w))      s = strength (i - start n) / (n - start n)

in iteration i of n, and nothing before the share `start`. As weight decay it passes by Adam's moments. It is
elementwise in float64 and rounded to float32 once, so that it does not depend on the layout.
"""

from __future__ import annotations

from torch import Tensor

from quantexp.quant.outside_products import StateSlot


def strength_of(slot: StateSlot, iteration: int, iterations: int) -> float:
    """s in an iteration, of so many that the schedule has; 0 before it begins."""
    options = dict(slot.options)
    begin = options["start"] * iterations
    return options["strength"] * max(0.0, iteration - begin) / (iterations - begin)


def pulled(w: Tensor, rounded: Tensor, factor: float) -> Tensor:
    """w - factor (w - rounded), float64."""
    wide = w.double()
    return wide - (wide - rounded) * factor
