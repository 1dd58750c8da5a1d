"""Messages on standard error."""

from __future__ import annotations

import pytest

from quantexp.terminal.messages import (
    LONGEST_MESSAGE,
    LONGEST_WORD,
    complain,
    one_short_line,
)


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
