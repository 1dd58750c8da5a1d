from __future__ import annotations

import itertools

import pytest

from quantexp.model.pieces import Piece
from quantexp.model.row_blocks import boxes
from quantexp.model.shards import WHOLE, Shard


def positions(piece: Piece) -> list[tuple[int, int]]:
    """Row and column in the whole parameter of each element of a piece, counted one by one."""
    shape = piece.shape if len(piece.shape) == 2 else (1, *piece.shape)
    shard = piece.shard
    axis = None if shard.axis is None else shard.axis + 2 - len(piece.shape)
    own = [i for start, stop in shard.ranges for i in range(start, stop)]
    kept = [own if axis == a else range(n) for a, n in enumerate(shape)]
    return [(row, column) for row in kept[0] for column in kept[1]][piece.start : piece.stop]


@pytest.mark.parametrize(
    ("shape", "shard"),
    [
        ((6, 8), WHOLE),
        ((6, 10), WHOLE),
        ((13,), WHOLE),
        ((8, 10), Shard(0, ((0, 2), (4, 6)))),
        ((5, 16), Shard(1, ((8, 16),))),
    ],
)
@pytest.mark.parametrize("block", [1, 4, 1 << 40])
def test_boxes_are_the_elements_of_a_piece_in_order_and_say_which_blocks_are_cut(
    shape: tuple[int, ...], shard: Shard, block: int
) -> None:
    part = positions(Piece(shape, shard, 0, 10**6))
    columns = sorted({column for _, column in part})
    for start, stop in itertools.combinations(range(len(part) + 1), 2):
        piece = Piece(shape, shard, start, stop)
        elements = positions(piece)
        found: list[tuple[int, int]] = []
        for box in boxes(piece, block):
            assert box.first == len(found)
            assert box.stop == box.first + box.rows * box.columns
            own = [
                (box.row + row, box.column + column)
                for row in range(box.rows)
                for column in range(box.columns)
            ]
            found += own
            first = columns[0] + (box.column - columns[0]) // block * block
            end = columns[0] + -(-(box.column + box.columns - columns[0]) // block) * block
            is_whole = box.column == first and box.column + box.columns == min(end, columns[-1] + 1)
            if box.cut is None:
                assert is_whole
            else:
                assert not is_whole
                assert box.rows == 1
                assert box.cut == (first, min(first + block, columns[-1] + 1))
        assert found == elements
        assert sum(box.cut is not None for box in boxes(piece, block)) <= 2


def test_whole_rows_are_one_box() -> None:
    (box,) = boxes(Piece((6, 8), WHOLE, 0, 48), 4)
    assert (box.rows, box.columns, box.cut) == (6, 8, None)
