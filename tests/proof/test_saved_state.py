"""Elements of a training state in files, against the whole parameter that the pieces were cut from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantexp.model.pieces import Piece
from quantexp.model.shards import WHOLE, Shard
from quantexp.model.training_state import metadata_of
from quantexp.proof.saved_state import drawn, elements_at, num_not_written, num_other, places

SHAPE = (12, 6)
#: Whole; columns of one rank of two; gate's and up's rows of one; ranges of those by a distributed optimizer.
PIECES = [
    Piece(SHAPE, WHOLE, 0, 72),
    Piece(SHAPE, WHOLE, 17, 41),
    Piece(SHAPE, Shard(1, ((3, 6),)), 0, 36),
    Piece(SHAPE, Shard(0, ((0, 3), (6, 9))), 0, 36),
    Piece(SHAPE, Shard(0, ((3, 6), (9, 12))), 5, 30),
]


def _cut(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    part = whole
    if piece.shard.axis is not None:
        ranges = [range(start, stop) for start, stop in piece.shard.ranges]
        lines = torch.tensor([line for each in ranges for line in each])
        part = whole.index_select(piece.shard.axis, lines)
    return part.flatten()[piece.start : piece.stop].clone()


@pytest.mark.parametrize("piece", PIECES)
def test_places_are_those_in_the_whole_parameter(piece: Piece) -> None:
    whole = torch.arange(72).view(SHAPE)
    own = _cut(whole, piece).numpy()
    every = np.arange(piece.numel)
    assert (places(piece, every) == own).all()
    found = elements_at(piece, np.arange(72))
    assert [int(at) for at in found if at >= 0] == [int(list(own).index(v)) for v in sorted(own)]
    assert (found >= 0).sum() == piece.numel


@pytest.mark.parametrize("target", PIECES)
@pytest.mark.parametrize("cut", ["columns", "rows"])
def test_state_of_another_layout_is_found_and_a_changed_element_named(
    target: Piece, cut: str, tmp_path: Path
) -> None:
    whole = torch.randn(SHAPE)
    halves = {
        "columns": [Shard(1, ((0, 3),)), Shard(1, ((3, 6),))],
        "rows": [Shard(0, ((0, 3), (6, 9))), Shard(0, ((3, 6), (9, 12)))],
    }[cut]
    files = []
    for index, shard in enumerate(halves):
        piece = Piece(SHAPE, shard, 0, 36)
        files.append(tmp_path / f"{index}.safetensors")
        tensors = {f"{kind}/w": _cut(whole, piece) for kind in ("main", "exp_avg")}
        save_file(tensors, files[-1], metadata=metadata_of({"w": piece}))
    own = _cut(whole, target).numpy()
    at = drawn(target.numel, 0.5)
    values = {"main": own[at], "exp_avg": own[at].copy(), "not saved": own[at]}
    assert num_other(files, {"w": (target, at, values)}) == {}
    values["exp_avg"][3] += 1e-6
    assert num_other(files, {"w": (target, at, values)}) == {"exp_avg/w": 1}


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("first", [0.0, 0.5, 0.999])
def test_drawn_elements_are_inside_and_differ(number: int, first: float) -> None:
    at = drawn(number, first)
    assert len(at) == min(number, 64)
    assert 0 <= at.min() <= at.max() < number


def test_a_file_that_lacks_what_a_rank_holds_or_has_another_value_is_named(tmp_path: Path) -> None:
    whole = torch.randn(SHAPE)
    held, saved = PIECES[0], PIECES[2]
    tensors = {"main/w": _cut(whole, saved), "exp_avg/w": _cut(whole, saved) + 1}
    save_file(tensors, file := tmp_path / "rank.safetensors", metadata_of({"w": saved}))
    values = {"main": _cut(whole, saved).numpy(), "exp_avg": (_cut(whole, saved) + 1).numpy()}
    every = np.arange(saved.numel)
    assert num_not_written(file, {"w": (saved, every, values)}) == {}
    other = {"main": values["main"], "exp_avg": values["exp_avg"] * 2, "exp_avg_sq": values["main"]}
    wrong = num_not_written(file, {"w": (saved, every, other), "v": (saved, every, values)})
    assert wrong == {"exp_avg/w": 36, "exp_avg_sq/w": 36, "main/v": 36, "exp_avg/v": 36}
    # Half of the columns are not in the file.
    whole_values = {"main": whole.flatten().numpy()}
    assert num_not_written(file, {"w": (held, np.arange(72), whole_values)}) == {"main/w": 36}
    assert num_other([file], {"w": (held, np.arange(72), whole_values)}) == {}
