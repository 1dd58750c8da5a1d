"""A run's report, written when it ends."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from quantexp.errors import RunError
from quantexp.launch.outcome import outcome
from quantexp.launch.summary import print_outcome
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment

RunTiny = Callable[..., RunDir]


def summary(experiment: Experiment, run: RunDir) -> str:
    stream = io.StringIO()
    print_outcome(outcome(experiment, run), Console(width=300, file=stream))
    return stream.getvalue()


def test_a_completed_run_has_a_report_with_its_status(
    run_tiny: RunTiny, tiny: Callable[..., Experiment]
) -> None:
    run = run_tiny("analysis.auto=quick", "quant=linear_mxfp8")
    text = run.report.read_text()
    assert "<dd>completed</dd>" in text
    assert '"sqnr_db":' in text
    assert str(run.report) in summary(tiny("analysis.auto=quick", "quant=linear_mxfp8"), run)


def test_a_run_whose_report_cannot_be_written_completes_with_a_message(
    run_tiny: RunTiny,
    tiny: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*words: object) -> None:
        raise RunError("no room")

    monkeypatch.setattr("quantexp.analysis.report.write.write_report", refuse)
    run = run_tiny("analysis.auto=quick")
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.COMPLETED
    errors = capsys.readouterr().err
    assert "no room" in errors
    assert f"report.html was not written; quantexp report {run.root}" in errors
    printed = summary(tiny("analysis.auto=quick"), run)
    assert "not written (quantexp report writes it), see" in printed


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
