"""Elements of a parameter that one rank holds, and what two such sets have in common. Needs no torch.

A rank's part of a parameter is a `Shard`. Of the part, flattened, a distributed optimizer keeps a range [start, stop)
on each data-parallel rank; any other keeps it whole. Both are runs of the whole parameter, flattened:

    whole    0 1 2 3 | 4 5 6 7 | 8 9 10 11      a matrix of 3 x 4
    part     0 1       4 5       8 9            columns 0 and 1
    piece          1   4 5                      its range [1, 4): runs 1 to 2, and 4 to 6

Blocks of moments and gradients run along the last axis of the whole parameter, each within one row. A distributed
optimizer's range may begin and end anywhere, so its first and its last block may be cut:

    part of 2 rows, width 8, blocks of 4     0 1 2 3 | 4 5 6 7
                                             8 9 a b | c d e f
    its range [2, 12)                        2 3 (cut)   4 to 7, 8 to b (whole blocks)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from quantexp.model.shards import Shard


@dataclass(frozen=True)
class Run:
    """Elements that lie together in the whole parameter and in a piece of it."""

    #: The first element in the whole parameter, and in the piece.
    whole: int
    first: int
    count: int

    @property
    def end(self) -> int:
        """The element of the whole parameter after the last."""
        return self.whole + self.count


@dataclass(frozen=True)
class Piece:
    """A range of the elements of a part."""

    #: Of the whole parameter.
    shape: tuple[int, ...]
    shard: Shard
    #: The range [start, stop) of the flattened part.
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def fits(self) -> bool:
        """Whether it lies within the parameter."""
        axis = self.shard.axis
        extent = 0 if axis is None or not 0 <= axis < len(self.shape) else self.shape[axis]
        inside = all(0 <= start <= stop <= extent for start, stop in self.shard.ranges)
        return inside and 0 <= self.start <= self.stop <= math.prod(self.shard.shape(self.shape))

    def runs(self) -> Iterator[Run]:
        """Its runs, in order."""
        begin = 0
        for whole, count in _runs(self.shape, self.shard):
            low, high = max(begin, self.start), min(begin + count, self.stop)
            if low < high:
                yield Run(whole + low - begin, low - self.start, high - low)
            begin += count


def _runs(shape: tuple[int, ...], shard: Shard) -> Iterator[tuple[int, int]]:
    """First element and number of each run of a part, flattened."""
    if shard.axis is None:
        yield 0, math.prod(shape)
        return
    extent, inner = shape[shard.axis], math.prod(shape[shard.axis + 1 :])
    for outer in range(math.prod(shape[: shard.axis])):
        for start, stop in shard.ranges:
            yield (outer * extent + start) * inner, (stop - start) * inner


@dataclass(frozen=True)
class Copy:
    """Elements that lie together in two pieces of a parameter."""

    source: int
    target: int
    count: int


def common(source: Piece, target: Piece) -> Iterator[Copy]:
    """The elements that two pieces of one parameter share, in order, as few copies as possible."""
    last: Copy | None = None
    for each in _common(source, target):
        if last is None:
            last = each
        elif (last.source + last.count, last.target + last.count) == (each.source, each.target):
            last = Copy(last.source, last.target, last.count + each.count)
        else:
            yield last
            last = each
    if last is not None:
        yield last


def _common(source: Piece, target: Piece) -> Iterator[Copy]:
    runs, others = source.runs(), target.runs()
    run, other = next(runs, None), next(others, None)
    while run is not None and other is not None:
        low, high = max(run.whole, other.whole), min(run.end, other.end)
        if low < high:
            yield Copy(run.first + low - run.whole, other.first + low - other.whole, high - low)
        if run.end <= other.end:
            run = next(runs, None)
        else:
            other = next(others, None)


@dataclass(frozen=True)
class Box:
    """Elements of whole rows, or of one row, that lie together in a piece."""

    #: The first of them in the piece.
    first: int
    rows: int
    columns: int
    #: The first of them in the whole parameter, as a matrix.
    row: int
    column: int
    #: The block that they are a part of, [first column, end column) in the whole parameter; None for whole blocks.
    cut: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        """The element of the piece after the last."""
        return self.first + self.rows * self.columns


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A parameter's shape as rows and columns; a vector is one row."""
    return prod(shape[:-1]), shape[-1]


def boxes(piece: Piece, block: int) -> Iterator[Box]:
    """A piece in as few boxes as possible, in order.

    Args:
        piece: of a vector or a matrix.
        block: elements of a block. In a part whose columns do not begin and end with blocks of the whole parameter, the
            blocks begin with the part.
    """
    shard = piece.shard
    by_columns = shard.axis is not None and shard.axis == len(piece.shape) - 1
    width = matrix_shape(shard.shape(piece.shape))[1]
    column = shard.ranges[0][0] if by_columns else 0
    rows = matrix_shape(piece.shape)[0]
    ranges = ((0, rows),) if by_columns or shard.axis is None else shard.ranges
    begin = 0
    for start, stop in ranges:
        low, high = max(piece.start, begin), min(piece.stop, begin + (stop - start) * width)
        at = low
        while at < high:
            row, first = divmod(at - begin, width)
            whole_rows = (high - at) // width if first == 0 else 0
            if whole_rows:
                yield Box(at - piece.start, whole_rows, width, start + row, column)
                at += whole_rows * width
                continue
            end = min(first + high - at, width)
            for left, right, cut in _in_row(first, end, width, block):
                shown = None if cut is None else (cut[0] + column, cut[1] + column)
                yield Box(
                    at - piece.start + left - first,
                    1,
                    right - left,
                    start + row,
                    column + left,
                    shown,
                )
            at += end - first
        begin += (stop - start) * width


def _in_row(
    first: int, end: int, width: int, block: int
) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """Columns [first, end) of a row: a cut block, whole blocks, a cut block; each if there is one."""
    while first < end:
        start = first // block * block
        stop = min(start + block, width)
        if first > start or end < stop:
            yield first, min(stop, end), (start, stop)
            first = stop
        else:
            whole = end if end == width else end // block * block
            yield first, whole, None
            first = whole
