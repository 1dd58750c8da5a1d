"""What a capture keeps when its run goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.capture.store.kept import NOTHING, Kept, cut_back, kept
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, finish_capture, part_of

STAMP = "20260102_030405"


def line(number: int, iteration: int, rank: int = 0, **more: object) -> dict[str, object]:
    file = f"bf16/{STAMP}_{number:04d}_linear_L0-qkv_forward_pre_linear_bf16_input.pt"
    return {"file": file, "bytes": 10, "iteration": iteration, "rank": rank, **more}


def write(folder: Path, lines: list[dict[str, object]], rank: int = 0) -> None:
    """The lists of a rank, and a file for each line that has one."""
    for name in (MANIFEST, STATISTICS):
        with part_of(folder / name, rank).open("a") as stream:
            stream.writelines(json.dumps(each) + "\n" for each in lines)
    for each in lines:
        path = folder / str(each["file"])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))


def files(folder: Path) -> list[str]:
    return sorted(path.name[16:20] for path in folder.glob("bf16/*"))


def test_everything_after_the_iteration_is_removed(tmp_path: Path) -> None:
    write(tmp_path, [line(1, 3), line(3, 6), line(5, 9)])
    write(tmp_path, [line(2, 3, 1), line(4, 6, 1), line(6, 9, 1)], rank=1)
    assert cut_back(tmp_path, 6) == 0
    assert files(tmp_path) == ["0001", "0002", "0003", "0004"]
    for name in (MANIFEST, STATISTICS):
        lines = [json.loads(text) for text in (tmp_path / name).read_text().splitlines()]
        assert [(each["iteration"], each["rank"]) for each in lines] == [
            (3, 0),
            (6, 0),
            (3, 1),
            (6, 1),
        ]
    assert not list(tmp_path.glob("*.rank*.jsonl"))


def test_values_that_no_list_names_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    """A killed process leaves values that it had not listed, and a line that it had not finished."""
    write(tmp_path, [line(1, 3)])
    with (tmp_path / MANIFEST).open("a") as stream:
        stream.write('{"file": "bf16/x')
    unlisted = tmp_path / "bf16" / f"{STAMP}_0002_linear_L0-qkv_forward_pre_linear_bf16_input.pt"
    for name in (unlisted.name, f"{unlisted.name}.part", "notes.pt", "rank0-00002.safetensors"):
        (tmp_path / "bf16" / name).write_bytes(b"")
    cut_back(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.glob("bf16/*") if "0001" not in p.name) == ["notes.pt"]
    assert len((tmp_path / MANIFEST).read_text().splitlines()) == 1


def test_cutting_back_again_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [line(1, 3), line(2, 6)])
    finish_capture(tmp_path)
    cut_back(tmp_path, 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    cut_back(tmp_path, 3)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_files_deleted_meanwhile_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [line(1, 3), line(2, 3)])
    next(tmp_path.glob("bf16/*_0002_*")).unlink()
    assert cut_back(tmp_path, 3) == 1


def test_run_without_captures_has_nothing_to_cut(tmp_path: Path) -> None:
    assert cut_back(tmp_path / "tensors", 3) == 0
    assert kept(tmp_path / "tensors", 0, 1) == NOTHING


def test_ranks_count_on_in_their_own_sequence(tmp_path: Path) -> None:
    """Rank 0 wrote numbers 1 and 3, rank 1 number 2; both lines of a weight name one file."""
    write(tmp_path, [line(1, 3), line(3, 3), line(3, 3, operation="backward")])
    write(tmp_path, [line(2, 3, 1)], rank=1)
    cut_back(tmp_path, 3)
    assert kept(tmp_path, 0, 2) == Kept(STAMP, 5, 20, 3)
    assert kept(tmp_path, 1, 2) == Kept(STAMP, 4, 10, 1)


@pytest.mark.parametrize(("world_size", "expected"), [(1, [4]), (4, [4, 5, 6, 7])])
def test_another_number_of_ranks_counts_above_all_numbers(
    tmp_path: Path, world_size: int, expected: list[int]
) -> None:
    write(tmp_path, [line(1, 3), line(3, 3)])
    write(tmp_path, [line(2, 3, 1)], rank=1)
    cut_back(tmp_path, 3)
    numbers = [kept(tmp_path, rank, world_size).next_number for rank in range(world_size)]
    assert numbers == expected


def test_tensors_in_shards_are_counted_by_their_keys(tmp_path: Path) -> None:
    own = line(1, 3)
    shard = {**own, "key": str(own["file"]).removesuffix(".pt"), "file": "shards/x.safetensors"}
    (tmp_path / MANIFEST).write_text(json.dumps(shard) + "\n")
    assert kept(tmp_path, 0, 1) == Kept(STAMP, 2, 10, 0)
