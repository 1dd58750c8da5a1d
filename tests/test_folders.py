"""Paths as users type them, and folders that cannot be written."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.folders import for_shell, shell_line, user_path, writing_into
from tests.pasting import words_of


def test_home_is_the_users_and_an_unknown_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/runs") == Path("/home/me/runs")
    assert user_path(Path("runs")) == Path("runs")
    assert user_path("~no-such-user/runs") == Path("~no-such-user/runs")


def test_a_path_is_one_word_of_a_command_and_no_flag(in_tmp: Path) -> None:
    assert for_shell(in_tmp / "runs of" / "it's") == shlex.quote("runs of/it's")
    assert for_shell(in_tmp / "-x") == "./-x"
    assert for_shell(in_tmp) == "."


#: Words that a paste breaks, or in which a reader cannot see a character.
HIDDEN = [
    "new\nline",
    "two\r\n\nlines ",
    "a\ttab",
    "it's\n\\new",
    "\\x41\n",
    "\x1b[31mred",
    "bell\x07\x7f\x85",
    "no-break\xa0space",
    "right\u202eto left",
    "zero\u200bwidth\ufeff",
    "line\u2028separator",
    "\U000f0000 of one's own \U0001f600",
    "no UTF-8 \udcff\udce9x",
    "$HOME `x` !! $'\n'",
]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_command_keeps_every_character_through_a_paste(shell: str) -> None:
    """The shell itself says which words it gets of one line that a terminal shows as it is."""
    if shutil.which(shell) is None and os.environ.get("QUANTEXP_REQUIRE_SHELLS") != "1":
        pytest.skip(f"{shell} is not installed")
    command = shell_line(HIDDEN)
    assert command.isprintable()
    assert words_of(command, shell) == HIDDEN


def test_a_failed_write_is_reported_with_its_folder_and_what_gives_another() -> None:
    with pytest.raises(RunError) as failed, writing_into(Path("figures"), RunError, "out=FOLDER"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    words = "No space left on device; give another with out=FOLDER"
    assert str(failed.value) == f"figures cannot be written: {words}"
