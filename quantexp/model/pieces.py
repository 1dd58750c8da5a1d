"""Elements of a parameter that one rank holds, and what two such sets have in common. Needs no torch.

A rank's part of a parameter is a `Shard`. Of the part, flattened, a distributed optimizer keeps a range [start, stop)
on each data-parallel rank; any other keeps it whole. Both are runs of the whole parameter, flattened:

    whole    0 1 2 3 | 4 5 6 7 | 8 9 10 11      a matrix of 3 x 4
    part     0 1       4 5       8 9            columns 0 and 1
    piece          1   4 5                      its range [1, 4): runs 1 to 2, and 4 to 6
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

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
