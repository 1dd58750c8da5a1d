"""The lists of a capture folder, line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.capture import lines
from quantexp.capture.lines import IterationIndex, lists_of, torn_lines
from quantexp.capture.store.manifest import MANIFEST, STATISTICS


def line(iteration: int, rank: int = 0) -> str:
    return json.dumps({"iteration": iteration, "rank": rank, "sample": {"iteration": 9}}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).write_text(line(1) + line(2) + line(1) + '{"iteration": 2, "ra')
    (tmp_path / "manifest.rank1.jsonl").write_text(line(2, 1))
    (tmp_path / STATISTICS).write_text(line(3))
    return tmp_path


def test_lists_of_all_ranks_are_listed(folder: Path) -> None:
    assert [file.name for file in lists_of(folder, MANIFEST)] == [MANIFEST, "manifest.rank1.jsonl"]
    assert [file.name for file in lists_of(folder)][2:] == [STATISTICS]
    assert lists_of(folder / "elsewhere") == []


def test_torn_lines_are_named(folder: Path) -> None:
    assert list(torn_lines(folder)) == [f"{MANIFEST}:4"]


def test_lines_of_an_iteration_are_read_without_the_torn_one(folder: Path) -> None:
    index = IterationIndex(folder, MANIFEST, lambda: False)
    assert sorted(index.places) == [1, 2]
    assert [(one["iteration"], one["rank"]) for one in index.read([2])] == [(2, 0), (2, 1)]
    assert len(index.read([1, 2, 7])) == 4
    assert not index.is_cut


def test_an_index_past_its_deadline_ends_early(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_STRIDE", 2)
    index = IterationIndex(folder, MANIFEST, lambda: True)
    assert index.is_cut
    assert sorted(index.places) == [1]
