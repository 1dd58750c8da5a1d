"""The process that draws, when it does not answer."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training.drawing import SHORT, Drawing, Failure


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


@pytest.mark.parametrize("iterations", [SHORT, SHORT + 1])
def test_the_process_of_a_short_run_starts_before_it_is_asked(
    iterations: int, tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = tiny()
    experiment.training.iterations, experiment.analysis.auto = iterations, "true"
    drawing = Drawing(RunDir(tmp_path), experiment)
    drawing._command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    before = set(psutil.Process().children())
    drawing.prepare()
    assert len(set(psutil.Process().children()) - before) == (iterations == SHORT)
    drawing.close()
    assert set(psutil.Process().children()) == before


#: Argument 1 is a run's folder; the module that draws says what it is called with, and dies of the second request.
FORKED = """
import os, sys, types
from pathlib import Path
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training import drawing

class Draws(types.ModuleType):
    def main(self, words):
        Path(words[0], "words").write_text(" ".join(words))
        for line in sys.stdin:
            if line == "report\\n":
                os._exit(5)
            print("null", flush=True)

sys.modules[drawing.AFTER_RUN] = Draws(drawing.AFTER_RUN)
own = os.open("/dev/null", os.O_RDONLY)
shown = Path(sys.argv[1], "shown")
drawing.fork_early([own], lambda words: shown.write_text(" ".join(words)))
one = drawing.Drawing(RunDir(Path(sys.argv[1])), Experiment())
print(one.make("figures"), one.make("report").reason)
one.close()
"""


def test_a_fork_draws_like_a_process_of_its_own(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "None the process that draws ended with exit code 5\n", done.stderr
    shown = (tmp_path / "shown").read_text()
    assert shown.split()[1:3] == ["-m", "quantexp.analysis.after_run"]
    assert shown.endswith((tmp_path / "words").read_text())
