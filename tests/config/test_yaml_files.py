"""YAML files that are refused before anything is built from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantexp.config.yaml_files import LARGEST_FILE, check_yaml
from quantexp.errors import ConfigError


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_yaml(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 30 + "]" * 30, ", line 1: it must be nested at most 30 deep"),
        ("a: 1\nb: &b [*b]", ", line 2: *b contains itself"),
        ("a: &a {x: {y: *a}}", ", line 1: *a contains itself"),
        (
            "a: &a [" + "x," * 999 + "]\nb: [" + "*a," * 101 + "]",
            ", line 2: it must have at most 100,000 values, aliases counted as what they stand for, got 101,001",
        ),
        ("a: " + "9" * 301, ", line 1: a number must have at most 300 digits"),
        ("a: 010", ", line 1: 010 is the number 8 in YAML; write 8, or '010' for the text"),
        ("a: 0x1F", ", line 1: 0x1F is the number 31 in YAML; write 31, or '0x1F' for the text"),
        ("a: 16:00", ", line 1: 16:00 is the number 960 in YAML; write 960, or '16:00' for t"),
        ("a: [", " cannot be read: while parsing a flow node"),
        ("a: \0", " cannot be read: "),
    ],
)
def test_file_beyond_a_limit_is_refused_with_its_line(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert refusal(tmp_path / "own.yaml").startswith(words)


@pytest.mark.parametrize(
    "text",
    ["", "a: &a [1]\nb: *a\nc: *a", "a: '010'", "a: 1_000", "a: 1.5e3", "\ufeffa: 1", "a: '16:00'"],
)
def test_file_within_the_limits_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    check_yaml(tmp_path / "own.yaml")


def test_file_of_another_kind_or_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_bytes("a: é".encode("latin-1"))
    assert refusal(file) == " is not UTF-8; save it as UTF-8"
    file.write_bytes(b"#" * (LARGEST_FILE + 1))
    assert refusal(file) == " must have at most 1,000,000 bytes, got 1,000,001"
    file.unlink()
    os.mkfifo(file)
    assert refusal(file) == " must be a regular file"
