"""The form of a rank's own lines, and the file for warnings and log lines of libraries."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path

import pytest

from quantexp.training.log import LOG, is_library_file, log_to_stderr, redirect_library_messages

MEGATRON = "/venv/lib/python3.11/site-packages/megatron/core/backends.py"


def test_warnings_and_log_lines_of_libraries_go_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "libraries0.log"
    with redirect_library_messages(file), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("Apex is not installed", UserWarning, MEGATRON, 21)
        logging.getLogger("megatron.core").warning("falling back")
    text = file.read_text()
    assert "Apex is not installed" in text
    assert "megatron.core WARNING falling back" in text
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_library_errors_go_to_the_file_and_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "libraries0.log"
    with redirect_library_messages(file):
        logging.getLogger("megatron.core").error("the cluster fell apart")
    assert "megatron.core ERROR the cluster fell apart" in file.read_text()
    assert capsys.readouterr().err == "megatron.core ERROR the cluster fell apart\n"


def test_own_warnings_are_shown_and_without_messages_no_file_is_created(tmp_path: Path) -> None:
    file = tmp_path / "libraries0.log"
    messages: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: messages.append(str(message))
        with redirect_library_messages(file):
            warnings.warn("ours", UserWarning, stacklevel=1)
    assert messages == ["ours"]
    assert not file.exists()


def test_warnings_and_loggers_are_restored(tmp_path: Path) -> None:
    before = warnings.showwarning
    logger = logging.getLogger("megatron")
    handlers, propagates = list(logger.handlers), logger.propagate
    with redirect_library_messages(tmp_path / "x.log"):
        assert warnings.showwarning is not before
    assert warnings.showwarning is before
    assert (logger.handlers, logger.propagate) == (handlers, propagates)


def test_only_installed_libraries_are_redirected() -> None:
    assert is_library_file(MEGATRON)
    assert not is_library_file("/src/quantexp/megatron/trainer.py")
    assert not is_library_file("/venv/lib/site-packages/rich/table.py")


def test_own_lines_have_time_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    before = LOG.level, LOG.propagate, list(LOG.handlers)
    with log_to_stderr("rank 3"):
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
    monkeypatch.setattr(
        "time.time_ns", lambda: 1767323103_500000000
    )  # of records since Python 3.13
    with log_to_stderr("wandb"):
        LOG.warning("network away")
    assert capsys.readouterr().err == "2026-01-02 03:05:03 WARNING wandb: network away\n"


class OfTorch(logging.Handler):
    """As torch 2.15 has one for standard error."""

    __module__ = "torch.of_this_test"

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{record.getMessage()}\n")


def test_no_line_contains_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for messages and tracebacks, our own and those of libraries, which may write to standard error."""
    monkeypatch.setenv("DB_PWD", "aSecretOfTheServer")
    of_torch = logging.getLogger("torch.of_this_test")
    monkeypatch.setattr(of_torch, "handlers", [logging.StreamHandler(), OfTorch()])
    monkeypatch.setattr(of_torch, "propagate", False)
    before = of_torch.handlers
    file = tmp_path / "libraries0.log"
    with log_to_stderr("rank 0"), redirect_library_messages(file):
        logging.getLogger("torch").error("cannot read aSecretOfTheServer")
        of_torch.warning("tries aSecretOfTheServer again")
        try:
            raise RuntimeError("https://me:word@host refuses aSecretOfTheServer")
        except RuntimeError:
            LOG.exception("failed")
        late = logging.getLogger("torch.of_this_test.late")
        late.addHandler(own := logging.StreamHandler())
        late.warning("tries aSecretOfTheServer once more")
        assert late.handlers == []
    assert (late.handlers, late.propagate) == ([own], True)
    late.removeHandler(own)
    text = capsys.readouterr().err + file.read_text()
    assert "RuntimeError: https://host refuses <DB_PWD>" in text
    assert "aSecretOfTheServer" not in text
    assert "torch.of_this_test WARNING tries <DB_PWD> again" in file.read_text()
    assert "torch.of_this_test.late WARNING tries <DB_PWD> once more" in file.read_text()
    assert (of_torch.handlers, of_torch.propagate) == (before, False)
