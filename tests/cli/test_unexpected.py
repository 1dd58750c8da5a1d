"""Exceptions that no verb expects: one line, and a file with the traceback."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from quantexp.cli import list as listing
from quantexp.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder; `quantexp list` raises an exception whose message has a secret and a line break."""

    def bug(*_: object) -> int:
        raise ValueError("nobody expects\nthis: s3cret-t0ken " + "9" * 5000)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MY_API_KEY", "s3cret-t0ken")
    monkeypatch.setattr(listing, "run", bug)
    return tmp_path / "cache"


def test_unexpected_exception_is_one_line_and_a_private_file(
    cache_home: Path, capsys: Captured
) -> None:
    assert main(["list"]) == 1
    captured = capsys.readouterr()
    (file,) = (cache_home / "quantexp" / "tracebacks").iterdir()
    assert captured.err.startswith(
        "quantexp: unexpected ValueError: nobody expects this: <MY_API_KEY>"
    )
    assert captured.err.endswith(f"; the traceback is in {file}\n")
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 1000
    assert captured.out == ""
    text = file.read_text()
    assert "Traceback (most recent call last):" in text
    assert "<MY_API_KEY>" in text
    assert "s3cret-t0ken" not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_without_a_cache_folder_the_traceback_is_in_the_temporary_one(
    cache_home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache_home.write_text("a file where a folder should be")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["list"]) == 1
    assert f"; the traceback is in {tmp_path}/" in capsys.readouterr().err


def test_if_no_file_can_be_written_the_line_has_the_place_of_the_bug(
    cache_home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_home.write_text("a file where a folder should be")
    monkeypatch.setattr("tempfile.tempdir", str(cache_home))
    assert main(["list"]) == 1
    message = capsys.readouterr().err
    assert "test_unexpected.py, line " in message
    assert message.endswith("; its traceback cannot be written)\n")


def test_invalid_file_name_is_the_users_error(
    capsys: Captured, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / "cache"))
    assert main(["draw", "a" * 6000]) == 1
    message = capsys.readouterr().err
    assert message.endswith(" is not a valid file name: File name too long\n")
    assert not (in_tmp / "cache").exists()
