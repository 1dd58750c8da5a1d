"""The form of a rank's own lines; and what libraries warn of is kept, in a file of its own."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest

from quantexp.training.log import LOG, is_of_library, library_messages_in, own_lines

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


def test_own_lines_have_time_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    before = LOG.level, LOG.propagate, list(LOG.handlers)
    with own_lines("rank 3"):
        LOG.info("building the model")
        try:
            raise ValueError("no such layer")
        except ValueError:
            LOG.exception("the run failed")
    LOG.info("is not shown")
    assert (LOG.level, LOG.propagate, LOG.handlers) == before
    first, second, *traceback = capsys.readouterr().err.splitlines()
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{time} INFO rank 3: building the model", first)
    assert re.fullmatch(rf"{time} ERROR rank 3: the run failed", second)
    assert (traceback[0], traceback[-1]) == (
        "Traceback (most recent call last):",
        "ValueError: no such layer",
    )


def test_own_lines_have_the_time_in_utc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.time", lambda: 1767323103.5)  # date -d 2026-01-02T03:05:03.5Z +%s.%N
    with own_lines("wandb"):
        LOG.warning("network away")
    assert capsys.readouterr().err == "2026-01-02 03:05:03 WARNING wandb: network away\n"
