"""Pieces of a parameter, against torch's own indexing of the whole one."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from quantexp.model.pieces import Copy, Piece, boxes, common
from quantexp.model.shards import WHOLE, Shard
from tests.model.huggingface.layouts import part_of


def whole_of(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def elements(piece: Piece) -> Tensor:
    return part_of(whole_of(piece.shape), piece.shard).reshape(-1)[piece.start : piece.stop]


def some_piece(source: random.Random, shape: tuple[int, ...]) -> Piece:
    axis = source.choice([None, *range(len(shape))])
    shard = WHOLE
    if axis is not None:
        ends = sorted(source.sample(range(shape[axis] + 1), source.choice([2, 4])))
        shard = Shard(axis, tuple(zip(ends[::2], ends[1::2], strict=True)))
    size = torch.Size(shard.shape(shape)).numel()
    start, stop = sorted(source.randrange(size + 1) for _ in range(2))
    return Piece(shape, shard, *source.choice([(0, size), (start, stop)]))


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 3)])
def test_runs_are_the_elements_of_the_piece(shape: tuple[int, ...]) -> None:
    source = random.Random(1)
    for _ in range(200):
        piece = some_piece(source, shape)
        assert piece.fits
        places = [run.whole + i for run in piece.runs() for i in range(run.count)]
        assert places == elements(piece).tolist()
        assert [run.first for run in piece.runs()] == [
            sum(run.count for run in list(piece.runs())[:i]) for i in range(len(list(piece.runs())))
        ]


def test_common_elements_of_two_pieces_are_copied_to_their_places() -> None:
    source = random.Random(2)
    for _ in range(500):
        a, b = (some_piece(source, (6, 8)) for _ in range(2))
        target = torch.full((b.numel,), -1)
        for copy in common(a, b):
            assert (target[copy.target : copy.target + copy.count] == -1).all()
            own = elements(a)[copy.source : copy.source + copy.count]
            target[copy.target : copy.target + copy.count] = own
        expected = torch.where(torch.isin(elements(b), elements(a)), elements(b), -1)
        assert torch.equal(target, expected)


def test_equal_pieces_are_one_copy_although_their_columns_lie_apart() -> None:
    piece = Piece((64, 32), Shard(1, ((8, 16),)), 3, 500)
    assert list(common(piece, piece)) == [Copy(0, 0, 497)]


@pytest.mark.parametrize(
    "piece",
    [
        Piece((4, 4), Shard(0, ((0, 5),)), 0, 4),
        Piece((4, 4), Shard(0, ((3, 2),)), 0, 0),
        Piece((4, 4), Shard(2, ((0, 1),)), 0, 1),
        Piece((4, 4), Shard(0, ((0, 2),)), 0, 9),
        Piece((4, 4), WHOLE, 5, 4),
        Piece((4, 4), WHOLE, -1, 4),
    ],
)
def test_piece_outside_of_its_parameter_does_not_fit(piece: Piece) -> None:
    assert not piece.fits


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
