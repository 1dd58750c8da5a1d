"""Pieces of a parameter, against torch's own indexing of the whole one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quantexp.model.pieces import Copy, Piece, common
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
