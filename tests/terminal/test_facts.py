"""Headings and values."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.terminal.facts import Facts


def lines(width: int, path: str) -> list[str]:
    facts = Facts(Console(file=io.StringIO(), width=width))
    facts.add_row("proof", "56 of 56 quantised slots engaged, 16 slots high (fp32)")
    facts.add_path("picture", Path(path))
    facts.print()
    assert isinstance(facts.console.file, io.StringIO)
    return [line.rstrip() for line in facts.console.file.getvalue().splitlines()]


def test_values_wrap_between_words_beside_their_heading() -> None:
    assert lines(40, "/r/a.png") == [
        "proof    56 of 56 quantised slots",
        "         engaged, 16 slots high (fp32)",
        "picture  /r/a.png",
    ]


def value_lines(width: int, value: str) -> list[str]:
    facts = Facts(Console(file=io.StringIO(), width=width))
    facts.add_row("cache", value)
    facts.print()
    assert isinstance(facts.console.file, io.StringIO)
    return facts.console.file.getvalue().splitlines()


def test_a_word_that_is_longer_than_the_room_is_not_broken() -> None:
    path = "/" + "folder/" * 5 + "cache"
    assert value_lines(30, f"{path} cannot be written: [bold]disk[/] full") == [
        "cache",
        path,
        "       cannot be written: disk",
        "       full",
    ]
    assert value_lines(30, f"it is {path}") == ["cache  it is", path]


def test_a_value_keeps_its_own_lines() -> None:
    assert value_lines(30, "one\n\ntwo") == ["cache  one", "", "       two"]


@pytest.mark.parametrize("width", [40, 80])
def test_a_path_is_never_broken_and_stays_on_the_line_of_its_heading(width: int) -> None:
    path = "/runs/" + "llama32-1b_wikipedia_FA_linear_mxfp8-36da3b10/figures/" * 2 + "quick [1].png"
    assert lines(width, path)[-1] == lines(200, path)[-1] == f"picture  {path}"


def test_a_path_below_the_working_directory_is_short() -> None:
    assert lines(80, str(Path.cwd() / "runs" / "a"))[-1] == "picture  runs/a"
