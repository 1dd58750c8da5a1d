"""What libraries warn of is kept, in a file of its own."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from quantexp.training.library_messages import is_of_library, library_messages_in

MEGATRON = "/venv/lib/python3.11/site-packages/megatron/core/backends.py"


def test_warnings_and_log_lines_of_libraries_go_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "libraries0.log"
    with library_messages_in(file), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("Apex is not installed", UserWarning, MEGATRON, 21)
        logging.getLogger("megatron.core").warning("falling back")
    text = file.read_text()
    assert "Apex is not installed" in text
    assert "megatron.core WARNING falling back" in text
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_an_error_of_a_library_is_shown_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "libraries0.log"
    with library_messages_in(file):
        logging.getLogger("megatron.core").error("the cluster fell apart")
    assert "megatron.core ERROR the cluster fell apart" in file.read_text()
    assert capsys.readouterr().err == "megatron.core ERROR the cluster fell apart\n"


def test_what_is_ours_is_shown_and_without_messages_there_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "libraries0.log"
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        with library_messages_in(file):
            warnings.warn("ours", UserWarning, stacklevel=1)
    assert shown == ["ours"]
    assert not file.exists()


def test_everything_is_as_it_was_afterwards(tmp_path: Path) -> None:
    before = warnings.showwarning
    logger = logging.getLogger("megatron")
    handlers, propagates = list(logger.handlers), logger.propagate
    with library_messages_in(tmp_path / "x.log"):
        assert warnings.showwarning is not before
    assert warnings.showwarning is before
    assert (logger.handlers, logger.propagate) == (handlers, propagates)


def test_only_installed_libraries_count() -> None:
    assert is_of_library(MEGATRON)
    assert not is_of_library("/src/quantexp/megatron/trainer.py")
    assert not is_of_library("/venv/lib/site-packages/rich/table.py")
