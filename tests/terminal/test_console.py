"""Output without a terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table

from quantexp.cli.main import main
from quantexp.terminal.console import (
    LONGEST_MESSAGE,
    LONGEST_WORD,
    PIPE_WIDTH,
    complain,
    one_short_line,
    output_console,
    pipe_console,
)


def table() -> Table:
    table = Table("scheme", "state", title="2 runs", title_justify="left", box=None, pad_edge=False)
    table.add_row("FA_linear_mxfp8", "completed")
    table.add_row("bf16", "failed")
    return table


def test_a_pipe_gets_no_blanks_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    pipe_console().print(table())
    assert capsys.readouterr().out.splitlines() == [
        "2 runs",
        "scheme           state",
        "FA_linear_mxfp8  completed",
        "bf16             failed",
    ]


@pytest.mark.parametrize("kind", ["schemes", "formats"])
def test_the_command_line_prints_no_blanks_at_the_ends_of_lines(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert not [line for line in lines if line != line.rstrip()]


def test_blanks_within_a_text_and_empty_lines_stay(capsys: pytest.CaptureFixture[str]) -> None:
    console = pipe_console()
    console.print("  a  b")
    console.print()
    console.print("c ", end="")
    console.print("d")
    assert capsys.readouterr().out == "  a  b\n\nc d\n"


def test_a_pipe_is_wide_unless_columns_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output_console().width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "70")
    assert output_console().width == 70


def test_a_terminal_is_printed_to_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console = output_console()
    assert console.is_terminal
    console.print("a ")
    assert capsys.readouterr().out == "a \n"


def test_a_stream_of_ascii_gets_no_other_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    pipe_console().print(Table("a"))
    sys.stdout.seek(0)
    assert sys.stdout.read().splitlines() == ["+---+", "| a |", "|---|", "+---+"]


def test_a_message_has_the_commands_name_and_no_hidden_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    complain("no run 'a\x1b[2J'\n  second")
    assert capsys.readouterr().err == "quantexp: no run 'a\\x1b[2J' second\n"


def test_short_message_stays_as_it_is() -> None:
    assert one_short_line("a must be b, got 3") == "a must be b, got 3"


def test_message_of_several_lines_becomes_one() -> None:
    assert one_short_line("a\n  b\tc\r\nd") == "a b c d"


def test_blanks_within_a_command_stay() -> None:
    assert one_short_line("now it is: quantexp draw 'a  b'") == "now it is: quantexp draw 'a  b'"


def test_path_stays_whole_and_a_longer_word_shows_its_ends_and_length() -> None:
    path = "/" + "a" * (LONGEST_WORD - 1)
    assert one_short_line(f"no file {path}") == f"no file {path}"
    message = one_short_line(f"a must be below 3, got {'9' * 5000} give less")
    assert (
        message
        == f"a must be below 3, got {'9' * 100}...(4,800 characters)...{'9' * 100} give less"
    )


def test_message_of_many_words_has_a_bounded_length() -> None:
    message = one_short_line("first " + "word " * 10000 + "last")
    assert len(message) < LONGEST_MESSAGE
    assert message.startswith("first word")
    assert message.endswith("word last")


def test_characters_that_act_on_a_terminal_are_escaped() -> None:
    assert one_short_line("a \x1b[31m \x07\x9b \u202e \udce9 ü") == (
        "a \\x1b[31m \\x07\\x9b \\u202e \\udce9 ü"
    )
