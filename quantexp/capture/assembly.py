"""Assembles whole tensors from the parts that ranks stored, and names what is missing.

Parts must cover the whole tensor exactly once, or as often as it has summands. A tensor of one part is that part,
memory-mapped; every other one is copied together. Summands are added in float32 (float32 ones in float64) in the order
of the ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantexp.capture.parts import Part

#: Pieces of a tensor between all bounds of its parts; more are refused.
_MOST_PIECES = 1 << 20


def require_cover(parts: Sequence[Part]) -> None:
    """Refuse parts of one tensor that do not cover it, or overlap.

    Raises:
        ValueError: names the ranges.
    """
    bounds = [_bounds(parts, axis) for axis in range(len(parts[0].whole))]
    shape = [len(each) - 1 for each in bounds]
    if np.prod(shape, dtype=float) > _MOST_PIECES:
        raise ValueError(f"the ranges of its {len(parts)} shards divide it into too many pieces")
    counts = np.zeros(shape, dtype=np.int64)
    for part in parts:
        counts[np.ix_(*(_cells(part, axis, each) for axis, each in enumerate(bounds)))] += 1
    expected = parts[0].summands
    if (counts < expected).any():
        where = _named(counts < expected, bounds)
        raise ValueError(
            f"{where} is missing"
            if expected == 1
            else f"{where} is the sum of {expected} ranks' tensors, and {counts.min()} are there"
        )
    if (counts > expected).any():
        raise ValueError(f"{_named(counts > expected, bounds)} is in several shards")


def _bounds(parts: Sequence[Part], axis: int) -> list[int]:
    ranges = (each for part in parts for each in part.ranges(axis))
    return sorted({0, parts[0].whole[axis], *(bound for each in ranges for bound in each)})


def _cells(part: Part, axis: int, bounds: Sequence[int]) -> list[int]:
    """The indices of the pieces between bounds that a part has along an axis."""
    return [
        i
        for i, (start, stop) in enumerate(pairwise(bounds))
        if any(first <= start and stop <= last for first, last in part.ranges(axis))
    ]


def _named(mask: np.ndarray[Any, Any], bounds: Sequence[Sequence[int]]) -> str:
    """The pieces of a mask as an index: `[:, 0:16+48:64]`; of pieces that form no grid, the first one."""
    indices = [np.unique(each) for each in np.nonzero(mask)]
    if np.prod([len(each) for each in indices]) != mask.sum():
        indices = [each[:1] for each in np.nonzero(mask)]
    return f"[{', '.join(map(_ranges, indices, bounds))}]"


def _ranges(cells: np.ndarray[Any, Any], bounds: Sequence[int]) -> str:
    if len(cells) == len(bounds) - 1:
        return ":"
    merged: list[list[int]] = []
    for cell in cells.tolist():
        if merged and merged[-1][1] == bounds[cell]:
            merged[-1][1] = bounds[cell + 1]
        else:
            merged.append([bounds[cell], bounds[cell + 1]])
    return "+".join(f"{start}:{stop}" for start, stop in merged)


def assembled(parts: Sequence[tuple[Part, Tensor]]) -> Tensor:
    """The whole tensor of parts that cover it.

    Raises:
        ValueError: values of another shape than their part, or of different dtypes.
    """
    dtypes = {str(x.dtype) for _, x in parts}
    if len(dtypes) > 1:
        raise ValueError(f"its shards have different dtypes: {', '.join(sorted(dtypes))}")
    for part, x in parts:
        if tuple(x.shape) != part.shape:
            raise ValueError(f"a shard of it has the shape {list(x.shape)}, not {list(part.shape)}")
    (first, x), is_sum = parts[0], parts[0][0].summands > 1
    if len(parts) == 1 and not is_sum:
        return x
    dtype = (torch.float64 if x.dtype.itemsize > 2 else torch.float32) if is_sum else x.dtype
    whole = torch.zeros(first.whole, dtype=dtype)
    for part, values in parts:
        for place, own in _boxes(part):
            if is_sum:
                whole[place] += values[own]
            else:
                whole[place] = values[own]
    return whole.to(x.dtype)


def _boxes(part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each contiguous box of a part: its place in the whole tensor, and in the part."""
    for boxes in product(*(_intervals(part, axis) for axis in range(len(part.whole)))):
        yield tuple(place for place, _ in boxes), tuple(own for _, own in boxes)


def _intervals(part: Part, axis: int) -> Iterator[tuple[slice, slice]]:
    at = 0
    for start, stop in part.ranges(axis):
        yield slice(start, stop), slice(at, at + stop - start)
        at += stop - start
