"""JSON of bounded size, depth and numbers; errors name the file and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import pytest

from quantexp.errors import UnreadableError
from quantexp.reading.json_files import (
    MOST_LINE,
    flat_values,
    json_lines,
    lines_of,
    read_json,
    require_json,
)


class Point(TypedDict, total=False):
    loss: float | None
    more: Any


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ", line 1: "),
        ('{"loss":\n\n x}', ", line 3: unexpected character"),
        ("[" * 200_000, ", line 1: "),
        ('{"loss": ' + "9" * 5000 + "}", ", line 1: number is infinity when parsed as double"),
        ('{"loss": 1e999}', ", line 1: number is infinity when parsed as double"),
        ('{"more": "\\ud800"}', ", line 1: "),
        ("\ufeff{}", ", line 1: "),
        ('{"more": ' + "[" * 100 + "]" * 100 + "}", ": it must have at most 64 levels of brackets"),
        ("[" + "0," * 10_000_001 + "0]", ": it must have at most 10,000,000 values"),
        ('{"loss": "abc"}', ": loss must be a number or null, got 'abc'"),
        ("[]", ": it must be keys with values, got a list"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(UnreadableError) as caught:
        read_json(file, Point)
    assert str(caught.value).startswith(f"{file}{words}")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "Infinity", "null"])
def test_numbers_that_are_not_finite_are_null(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(f'{{"loss": {text}, "more": [{text}, "NaN, NaN"]}}')
    content = read_json(file, Point)
    assert content["loss"] is None
    assert content["more"][0] is None
    file.write_text('{"loss": 1, "loss": 2}')
    assert read_json(file, Point) == {"loss": 2}


def test_a_missing_file_is_distinguished_from_an_invalid_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "a", Point)
    with pytest.raises(UnreadableError, match=r"/a is missing$"):
        require_json(tmp_path / "a", Point)


def test_wrong_lines_are_reported_and_an_unfinished_one_is_left_out(tmp_path: Path) -> None:
    file, wrong = tmp_path / "a.jsonl", list[UnreadableError]()
    file.write_text('{"loss": 1}\n\n{"loss": []}\n{"lo\n{"loss": 2}\n{"loss": 3')
    assert list(json_lines(file, Point, wrong.append)) == [{"loss": 1}, {"loss": 2}]
    assert [str(error).removeprefix(str(file)) for error in wrong] == [
        ", line 3: loss must be a number or null, got a list",
        ", line 4: unexpected control character in string",
    ]
    assert list(json_lines(tmp_path / "none", Point, wrong.append)) == []


def test_a_line_that_never_ends_ends_the_reading(tmp_path: Path) -> None:
    file, wrong = tmp_path / "a.jsonl", list[UnreadableError]()
    file.write_bytes(b'{"loss": 1}\n')
    with file.open("ab") as stream:
        stream.truncate(MOST_LINE * 3)
    (line,) = lines_of(file, wrong.append)
    assert (line.number, line.offset, line.is_ended) == (1, 0, True)
    assert [str(e) for e in wrong] == [
        f"{file}, line 2: it has more than 16.8 MB, and ends the reading"
    ]
    assert list(lines_of(tmp_path, wrong.append)) == []
    assert str(wrong[1]) == f"{tmp_path} must be a file, and is a folder"


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        (b'{"a": 1}\n{"b": null}\n', [{"a": 1}, {"b": None}]),
        (b'{"a": 1}\n\n', None),
        (b'{"a": 1}\n{"a": \n', None),
        (b'{"a": 1}, {"a": 2}\n', None),
        (b'{"a": [1]}\n', None),
        (b'{"a": {"b": 1}}\n', None),
        (b'{"a": "{"}\n', None),
        (b'{"a": NaN}\n', None),
        (b"[1]\n", None),
        (b"1\n", None),
        (b'{"a": 1}\n2\n', None),
    ],
)
def test_flat_lines_are_read_at_once_and_others_are_not(
    lines: bytes, values: list[dict[str, Any]] | None
) -> None:
    assert flat_values(lines) == values
