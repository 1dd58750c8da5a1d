"""What a run draws when it ends, and its report; by another process than its ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.errors import RunError
from quantexp.launch.attempt import open_run
from quantexp.launch.outcome import outcome
from quantexp.launch.summary import print_outcome
from quantexp.runs.paths import RunDir
from quantexp.runs.snapshot import environment
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from quantexp.training.worker import Worker

RunTiny = Callable[..., RunDir]
#: A rank as it is launched, and the modules that it holds when it ends.
_RANK = """\
import sys
from quantexp.training import worker
code = worker.main(sys.argv[1:])
print(*sys.modules)
sys.exit(code)
"""


def summary(experiment: Experiment, run: RunDir) -> str:
    stream = io.StringIO()
    print_outcome(outcome(experiment, run), Console(width=300, file=stream))
    return stream.getvalue()


@pytest.fixture(scope="module")
def completed(
    tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Experiment, RunDir, set[str]]:
    """A run with captured tensors, and the modules of its rank."""
    words = ["analysis.auto=quick", "quant=linear_mxfp8"]
    root = tmp_path_factory.mktemp("runs")
    experiment = compose([*tiny_words, f"paths.root={root}", *words])
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        command = [sys.executable, "-c", _RANK, str(folder.run.root)]
        rank = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | environment(folder.snapshot),
        )
    assert rank.returncode == 0, rank.stderr
    return experiment, folder.run, set(rank.stdout.split())


def test_a_completed_run_has_a_picture_and_a_report_with_its_status(
    completed: tuple[Experiment, RunDir, set[str]],
) -> None:
    experiment, run, _ = completed
    assert (run.figures / "quick_analysis.png").exists()
    text = run.report.read_text()
    assert "<dd>completed</dd>" in text
    assert '"sqnr_db":' in text
    assert "quick_analysis.png" in text
    assert str(run.report) in summary(experiment, run)


def test_a_rank_imports_nothing_of_the_figures(
    completed: tuple[Experiment, RunDir, set[str]],
) -> None:
    *_, modules = completed
    assert "quantexp.training.megatron.trainer" in modules
    figures = ("quantexp.analysis.", "matplotlib.", "jinja2.")
    assert [name for name in modules if f"{name}.".startswith(figures)] == []


def test_a_run_whose_report_cannot_be_written_completes_with_a_message(
    tiny: Callable[..., Experiment], capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = tiny("analysis.auto=quick")
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        folder.run.report.mkdir()
        assert Worker(folder.run, experiment).run() == 0
    run = folder.run
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.COMPLETED
    words = f"the report cannot be written to {run.report}: Is a directory; give out=PATH elsewhere"
    again = f"quantexp report {run.root}"
    assert status.reason == f"report.html was not written ({words}); {again}"
    logged = capfd.readouterr().err
    assert f"ERROR rank 0: report.html was not written; {again}\nTraceback" in logged
    assert f"RunError: {words}\n" in logged
    run.report.rmdir()
    assert "not written (quantexp report writes it), see" in summary(experiment, run)


@pytest.mark.slow
def test_a_run_whose_figures_cannot_be_drawn_completes_with_a_message(
    tiny: Callable[..., Experiment],
) -> None:
    experiment = tiny("analysis.auto=quick", "capture=stats")
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        folder.run.figures.touch()
        assert Worker(folder.run, experiment).run() == 0
    status = read_status(folder.run.status)
    assert status is not None
    assert status.state is State.COMPLETED
    assert status.reason.startswith("the figures were not drawn (FileExistsError: ")
    assert status.reason.endswith(f"; quantexp draw {folder.run.root}")
    assert folder.run.report.exists()


def test_a_failed_run_has_a_report_with_its_reason(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object, **options: object) -> None:
        raise RunError("out of <luck>")

    monkeypatch.setattr("quantexp.training.megatron.trainer.train", fail)
    run = run_tiny("analysis.auto=quick", expect=1)
    assert "failed: out of &lt;luck&gt;" in run.report.read_text()
    without = run_tiny("analysis.auto=false", "training.seed=2", expect=1)
    assert not without.report.exists()
