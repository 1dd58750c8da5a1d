"""Messages on standard error."""

from __future__ import annotations

import pytest

from quantexp.terminal.messages import complain


def test_a_message_has_the_commands_name_and_no_hidden_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    complain("no run 'a\x1b[2J'\n  second")
    assert capsys.readouterr().err == "quantexp: no run 'a\\x1b[2J' second\n"
