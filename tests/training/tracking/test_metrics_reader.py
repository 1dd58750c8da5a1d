"""metrics.jsonl while it grows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantexp.training.tracking import metrics_reader
from quantexp.training.tracking.metrics_reader import MetricsReader

from .conftest import line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def reader(file: Path) -> Iterator[MetricsReader]:
    with contextlib.closing(MetricsReader(file)) as reader:
        yield reader


def write(file: Path, *iterations: int) -> None:
    with file.open("a") as stream:
        stream.writelines(json.dumps(line(i)) + "\n" for i in iterations)


def read(reader: MetricsReader) -> list[int]:
    return [point.iteration for point in reader.read()]


def test_file_that_is_not_there_yet_has_no_points(file: Path, reader: MetricsReader) -> None:
    assert read(reader) == []
    write(file, 1)
    assert read(reader) == [1]


def test_points_come_again_until_they_are_accepted(file: Path, reader: MetricsReader) -> None:
    write(file, 1, 2)
    assert read(reader) == read(reader) == [1, 2]
    reader.accept()
    write(file, 3)
    assert read(reader) == [3]
    with contextlib.closing(MetricsReader(file, reader.offset)) as later:
        assert read(later) == [3]


def test_line_that_is_not_whole_yet_waits(file: Path, reader: MetricsReader) -> None:
    whole = json.dumps(line(1)) + "\n"
    file.write_text(whole[:20])
    assert read(reader) == []
    reader.accept()
    with file.open("a") as stream:
        stream.write(whole[20:])
    assert read(reader) == [1]


def test_line_of_another_version_is_passed_over(file: Path, reader: MetricsReader) -> None:
    file.write_text('{"iteration": 1}\n{torn\n[]\n')
    write(file, 4)
    assert read(reader) == [4]


def test_much_is_read_in_parts(file: Path, reader: MetricsReader) -> None:
    write(file, *([1] * metrics_reader.MAX_LINES), 2)
    assert len(read(reader)) == metrics_reader.MAX_LINES
    reader.accept()
    assert read(reader) == [2]


def test_file_that_is_moved_away_is_read_to_its_end(file: Path, reader: MetricsReader) -> None:
    """As when another attempt sets this one aside."""
    write(file, 1)
    read(reader)
    reader.accept()
    write(file, 2)
    file.rename(file.with_name("moved"))
    write(file, 9)
    assert read(reader) == [2]
