"""YAML as this program writes it; YAML that expands, runs code or recurses is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.errors import UnreadableError
from quantexp.reading.yaml_files import read_yaml, read_yaml_text


def test_plain_values_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: {b: [1, 2.5, true, null, 'x']}\n")
    assert read_yaml(file) == {"a": {"b": [1, 2.5, True, None, "x"]}}
    assert read_yaml_text(file) == file.read_text()
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ", line 2: did not find expected node content"),
        ("a: &b [1]\nc: *b", ", line 2: it must have no alias, got *b"),
        (
            "a: !!python/name:os.system x",
            ", line 1: it must have no tag, got tag:yaml.org,2002:python/",
        ),
        ("a:\n  b: " + "[" * 100, ", line 2: it must have at most 64 levels"),
        ("a: " + "9" * 5000, ", line 1: a number must have at most 400 digits, got 5000"),
        ("a: 2024-99-99", ": month must be in 1..12"),
        ("a: \x1b", ": control characters are not allowed"),
        ("- 1", " must hold keys with values, got list"),
        ("", " must hold keys with values, got nothing"),
        ("<<: 3", ", line 1: expected a mapping"),
        ("a: 1\n---\nb: 2", ", line 2: but found another document"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UnreadableError) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(f"{file}{words}")
