"""Paths as users type them, and folders that cannot be written."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.folders import for_shell, user_path, writing_into


def test_home_is_the_users_and_an_unknown_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/runs") == Path("/home/me/runs")
    assert user_path(Path("runs")) == Path("runs")
    assert user_path("~no-such-user/runs") == Path("~no-such-user/runs")


def test_a_path_is_one_word_of_a_command_and_no_flag(in_tmp: Path) -> None:
    assert for_shell(in_tmp / "runs of" / "it's") == shlex.quote("runs of/it's")
    assert for_shell(in_tmp / "-x") == "./-x"
    assert for_shell(in_tmp) == "."


def test_a_failed_write_is_reported_with_its_folder_and_what_gives_another() -> None:
    with pytest.raises(RunError) as failed, writing_into(Path("figures"), RunError, "out=FOLDER"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    words = "No space left on device; give another with out=FOLDER"
    assert str(failed.value) == f"figures cannot be written: {words}"
