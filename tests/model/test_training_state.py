"""The files of a training state: written by any ranks, read by any others, damage named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantexp.errors import DataError
from quantexp.model.pieces import Piece
from quantexp.model.safetensors import write_safetensors
from quantexp.model.shards import WHOLE, Shard
from quantexp.model.training_state import (
    MAIN,
    MOMENTS,
    LossScale,
    SavedPieces,
    StateIndex,
    metadata_of,
    rank_file,
    read_index,
    write_index,
)

KINDS = (MAIN, *MOMENTS)
SHAPE = (6, 4)
LEFT, RIGHT = (Shard(1, ((start, start + 2),)) for start in (0, 2))
#: Two ranks with two columns each; the second one's are divided over two data-parallel ranks.
PIECES = [Piece(SHAPE, LEFT, 0, 12), Piece(SHAPE, RIGHT, 0, 5), Piece(SHAPE, RIGHT, 5, 12)]
INDEX = StateIndex(
    version=2,
    iteration=7,
    layout={"tensor": 2},
    schedule_steps=7,
    optimizer_steps=6,
    loss_scale=LossScale(2.0**15, 3, 2),
    amax_histories={"layer 0 fc1 linear.fprop.x": {"window": 4, "amaxes": [0.1, 1e-38]}},
    files={rank_file(rank): "" for rank in range(3)},
    nonfinite=2,
)


def whole(kind: str) -> torch.Tensor:
    return torch.arange(24.0).view(SHAPE) + 100 * KINDS.index(kind)


def values(kind: str, piece: Piece) -> torch.Tensor:
    shard = piece.shard
    columns = slice(*shard.ranges[0]) if shard.axis == 1 else slice(None)
    return whole(kind)[:, columns].reshape(-1)[piece.start : piece.stop]


def write(folder: Path, rank: int, piece: Piece, kinds: tuple[str, ...] = KINDS) -> None:
    tensors = {f"{kind}/w": values(kind, piece) for kind in kinds}
    write_safetensors(folder / rank_file(rank), tensors, metadata_of({"w": piece}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank, piece in enumerate(PIECES):
        write(tmp_path, rank, piece)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "ranks"),
    [
        (Piece(SHAPE, WHOLE, 0, 24), {0, 1, 2}),
        (Piece(SHAPE, Shard(0, ((0, 1), (4, 6))), 2, 11), {0, 1, 2}),
        (Piece(SHAPE, RIGHT, 1, 4), {1}),
        (PIECES[0], {0}),
    ],
)
def test_any_piece_is_put_together_from_the_files_that_have_its_elements(
    folder: Path, target: Piece, ranks: set[int]
) -> None:
    saved = SavedPieces.open(folder, INDEX.files, ["w"])
    assert {file.name for file in saved.files({"w": target})} == {rank_file(r) for r in ranks}
    read = saved.read("w", target, KINDS)
    for kind in KINDS:
        expected = values(kind, target)
        if target.shard.axis == 0:
            rows = torch.cat([whole(kind)[a:b] for a, b in target.shard.ranges])
            expected = rows.reshape(-1)[target.start : target.stop]
        assert torch.equal(read[kind], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_read_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whole numbers up to 23 have the same value in all dtypes."""
    for rank, piece in enumerate(PIECES):
        tensors = {"main/w": values("main", piece).to(dtype)}
        write_safetensors(tmp_path / rank_file(rank), tensors, metadata_of({"w": piece}))
    target = Piece(SHAPE, Shard(0, ((1, 5),)), 1, 15)
    read = SavedPieces.open(tmp_path, INDEX.files, ["w"]).read("w", target, (MAIN,))
    assert torch.equal(read[MAIN], whole("main")[1:5].reshape(-1)[1:15])


def test_files_are_safetensors_with_the_pieces_in_their_metadata(folder: Path) -> None:
    assert torch.equal(load_file(folder / rank_file(1))["exp_avg/w"], values("exp_avg", PIECES[1]))


def test_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_index(tmp_path / "state.json", INDEX)
    assert read_index(tmp_path / "state.json") == INDEX


def test_unreadable_index_is_named(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with pytest.raises(DataError, match=r"state\.json is missing; start without training\.start_o"):
        read_index(file)
    file.write_text("{}")
    with pytest.raises(DataError, match=r"state\.json: version is missing; start without"):
        read_index(file)
    content = {
        key: value for key, value in asdict(INDEX).items() if key not in ("nonfinite", "ranks")
    }
    file.write_text(json.dumps({**content, "version": 1}))
    with pytest.raises(DataError, match=r"has version 1, and this quantexp reads version 2: use "):
        read_index(file)


def lose(folder: Path) -> None:
    (folder / rank_file(2)).unlink()


def cut(folder: Path) -> None:
    content = (folder / rank_file(2)).read_bytes()
    (folder / rank_file(2)).write_bytes(content[:-4])


def leave_out(folder: Path) -> None:
    write_safetensors(folder / rank_file(2), {}, metadata_of({}))


def repeat(folder: Path) -> None:
    write(folder, 2, replace(PIECES[2], start=4))


def without_moments(folder: Path) -> None:
    write(folder, 2, PIECES[2], (MAIN,))


def of_another_shape(folder: Path) -> None:
    write(folder, 2, Piece((4, 4), RIGHT, 0, 8))


def without_metadata(folder: Path) -> None:
    write_safetensors(folder / rank_file(2), {"main/w": torch.zeros(7)}, {})


def too_long(folder: Path) -> None:
    tensors = {f"{kind}/w": torch.zeros(8) for kind in KINDS}
    write_safetensors(folder / rank_file(2), tensors, metadata_of({"w": PIECES[2]}))


def whole_numbers(folder: Path) -> None:
    tensors = {f"{kind}/w": values(kind, PIECES[2]).int() for kind in KINDS}
    write_safetensors(folder / rank_file(2), tensors, metadata_of({"w": PIECES[2]}))


def outside(folder: Path) -> None:
    metadata = metadata_of({"w": PIECES[2]})
    records = json.loads(metadata["pieces"])
    records["w"]["ranges"] = [[3, 5]]
    tensors = {f"{kind}/w": values(kind, PIECES[2]) for kind in KINDS}
    write_safetensors(folder / rank_file(2), tensors, {"pieces": json.dumps(records)})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose, r"rank00002\.safetensors is not a complete safetensors file: it is not a regular"),
        (cut, r"rank00002\.safetensors is not a complete safetensors file: "),
        (leave_out, r"does not hold every element of w once; start from another checkpoint, or"),
        (repeat, r"does not hold every element of w once; start from another checkpoint, or"),
        (without_moments, r"rank00002\.safetensors lacks exp_avg/w"),
        (
            of_another_shape,
            r"rank00002\.safetensors: w has shape \[4, 4\] there, and \[6, 4\] here",
        ),
        (without_metadata, r"rank00002\.safetensors holds no training state: 'pieces'"),
        (too_long, r"no training state: the piece of w does not have the elements that it should"),
        (whole_numbers, r"rank00002\.safetensors holds no training state: 'I32'"),
        (outside, r"no training state: the piece of w does not have the elements that it should"),
    ],
)
def test_missing_and_wrong_pieces_are_named(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder)
    with pytest.raises(DataError, match=words):
        SavedPieces.open(folder, INDEX.files, ["w"]).read("w", Piece(SHAPE, WHOLE, 0, 24), KINDS)


def test_file_that_is_cut_while_it_is_read_is_named(folder: Path) -> None:
    saved = SavedPieces.open(folder, INDEX.files, ["w"])
    cut(folder)
    with pytest.raises(DataError, match=r"rank00002\.safetensors lacks 4 bytes: it was cut while"):
        saved.read("w", Piece(SHAPE, WHOLE, 0, 24), KINDS)
    lose(folder)
    with pytest.raises(DataError, match=r"rank00002\.safetensors cannot be read: No such file"):
        saved.read("w", Piece(SHAPE, WHOLE, 0, 24), KINDS)
