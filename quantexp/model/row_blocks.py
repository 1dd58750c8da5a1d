"""How blocks along the rows of a parameter lie in a rank's piece of it. Needs no torch.

Blocks of moments and gradients run along the last axis of the whole parameter, each within one row. A distributed
optimizer's range may begin and end anywhere, so its first and its last block may be cut:

    part of 2 rows, width 8, blocks of 4     0 1 2 3 | 4 5 6 7
                                             8 9 a b | c d e f
    its range [2, 12)                        2 3 (cut)   4 to 7, 8 to b (whole blocks)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from quantexp.model.pieces import Piece


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
