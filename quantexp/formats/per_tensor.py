"""Formats without blocks: each element is quantised independently, under at most one scale per tensor.

y = e(x s) / s        e is the format's rounding, s the scale
"""

from __future__ import annotations

from torch import Tensor

from quantexp.formats import fp8, hif8
from quantexp.formats.layout import Scratch, chunk_limit
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family

#: The families of such formats, each with the function that computes e(x s).
SCALED_VALUES = {Family.HIF8: hif8.scaled_values, Family.FP8: fp8.scaled_values}


def quantise_flat(
    x_N: Tensor,
    y_N: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_N: Tensor | None = None,
) -> None:
    """Write e(x s) / s to y, which may be x itself; s is a 0-dim float32 tensor, None means 1.

    `random_N` is for stochastic rounding, see `rounding`.
    """
    scaled_values = SCALED_VALUES[spec.fmt.family]
    limit = chunk_limit(x_N.device)
    scratch = Scratch(min(x_N.numel(), limit), x_N.device)
    for start in range(0, x_N.numel(), limit):
        chunk = slice(start, start + limit)
        random = None if random_N is None else random_N[chunk]
        q = scaled_values(x_N[chunk], spec, scale, random, scratch)
        if scale is not None:
            q.div_(scale)
        y_N[chunk].copy_(q)
