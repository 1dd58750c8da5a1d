"""The process that draws, when it does not answer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training.drawing import Drawing, Failure


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("print('[\"no', end='')", "ended with exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL (out of memory?)"),
    ],
)
def test_a_process_that_dies_is_a_failure_of_each_request(
    program: str, end: str, tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    drawing = Drawing(RunDir(tmp_path), tiny())
    drawing._command = [sys.executable, "-c", program]
    failure = Failure(f"the process that draws {end}", "")
    assert [drawing.make("figures"), drawing.make("report")] == [failure] * 2
    drawing.close()


def test_a_process_that_works_ends_with_the_rank(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    drawing = Drawing(RunDir(tmp_path), tiny())
    drawing._command = [
        *(sys.executable, "-c"),
        "import sys\nfor line in sys.stdin: print('null', flush=True)\n",
    ]
    before = set(psutil.Process().children())
    assert drawing.make("report") is None
    (child,) = set(psutil.Process().children()) - before
    drawing.close()
    assert not child.is_running()


def test_the_warning_of_a_scheduler_does_not_end_the_process(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    drawing = Drawing(RunDir(tmp_path), tiny())
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR2); print('null', flush=True)"
    drawing._command = [sys.executable, "-c", program]
    assert drawing.make("figures") is None
    drawing.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_a_process_that_cannot_be_started_is_a_failure(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    drawing = Drawing(RunDir(tmp_path), tiny())
    drawing._command = [str(tmp_path)]
    failure = Failure("the process that draws cannot be started: Permission denied", "")
    assert drawing.make("figures") == failure
    drawing.close()
