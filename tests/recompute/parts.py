"""Operands that are sums of parts, in numpy: each part as `docs/schemes.md` defines it, sums by `math.fsum`.

    mean       of each channel the exact sum over the axis, divided in float64, rounded to float32
    channels   those whose sum of squares over the axis is among the largest; of equal ones all
    elements   those whose magnitude is among the largest; of equal ones all

Each part is taken of what is left, and what is left is the float32 difference to the rounded part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .captured import Array

#: An array rounded as a slot declares.
Rounded = Callable[[Array, Mapping[str, Any]], Array]


def pieces(
    x: Array, declared: Mapping[str, Any], dims: tuple[str, ...], rounded: Rounded
) -> list[Array]:
    """The parts of an operand, then what remains of it, then the parts of the error; float64.

    A part of the format `none` is not multiplied: it is subtracted in the working precision.
    """
    rest, result = x.astype(np.float64), []
    before = [part for part in declared["parts"] if not part.get("from_error")]
    after = [part for part in declared["parts"] if part.get("from_error")]
    for part in (*before, None, *after):
        source = rest if part is None else _taken(rest, part, dims)
        is_left_out = part is not None and part["format"] == "none"
        own = rounded(source, {"format": "bf16"} if is_left_out else part or declared)
        result += [] if is_left_out else [own.astype(np.float64)]
        rest = (rest - own).astype(np.float32).astype(np.float64)
    return result


def _taken(x: Array, part: Mapping[str, Any], dims: tuple[str, ...]) -> Array:
    if part["take"] == "elements":
        return np.where(_largest(np.abs(x).ravel(), part).reshape(x.shape), x, 0.0)
    along = ("tokens", "sequences") if part["along"] == "tokens" else (part["along"],)
    if part["along"] == "keys":
        sums = np.apply_along_axis(math.fsum, 0, x) / len(x)
        return np.broadcast_to(sums.astype(np.float32), x.shape).astype(float)
    (kept,) = (index for index, dim in enumerate(dims) if dim not in along)
    columns = np.moveaxis(x, kept, 0).reshape(x.shape[kept], -1)
    shape = [1] * x.ndim
    shape[kept] = -1
    if part["take"] == "mean":
        means = [math.fsum(column) / len(column) for column in columns]
        return np.broadcast_to(np.array(means, np.float32).reshape(shape), x.shape).astype(float)
    assert part["take"] == "channels"
    norms = np.array([math.fsum(column * column) for column in columns])
    return np.where(_largest(norms, part).reshape(shape), x, 0.0)


def _largest(magnitudes: Array, part: Mapping[str, Any]) -> Array:
    number = part["number"] if part.get("share") is None else round(part["share"] * magnitudes.size)
    number = min(max(number, 1), magnitudes.size)
    chosen: Array = magnitudes >= np.sort(magnitudes)[-number]
    return chosen
