"""Figures and report of a skipped run, by its `analysis.auto`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.analysis import after_run
from quantexp.analysis.after_run import draw_skipped, report_sweep
from quantexp.analysis.draw import verb
from quantexp.runs.evaluation import write_evaluation
from quantexp.runs.paths import RunDir
from quantexp.schema import AutoDraw, Experiment

RunTiny = Callable[..., RunDir]


def skip(experiment: Experiment, run: RunDir) -> str:
    """Skip the run and return the printed text."""
    console = Console(file=io.StringIO(), width=200)
    draw_skipped(run, experiment.analysis.drawing, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def files(run: RunDir) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.root.rglob("*.png")}


@pytest.mark.slow
def test_skipped_run_is_drawn_by_its_current_analysis_auto(
    run_tiny: RunTiny, tiny: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "num_cores", lambda: 1)
    words = ["quant=linear_mxfp8", "capture=stats"]
    run = run_tiny(*words, "analysis.auto=false")
    assert skip(tiny(*words, "analysis.auto=false"), run) == ""
    assert not run.report.exists()
    assert skip(tiny(*words, "analysis.auto=quick"), run) == ""
    assert [path.name for path in files(run)] == ["quick_analysis.png"]
    assert "quick_analysis.png" in run.report.read_text()
    before = files(run)
    assert skip(tiny(*words, "analysis.auto=quick"), run) == ""
    assert files(run) == before, "nothing is lacking"
    assert skip(tiny(*words, "analysis.auto=true"), run) == f"drawing    {run.root.name}\n"
    assert {"tensor_stats.txt", "numerics"} <= {path.name for path in run.figures.iterdir()}
    assert "numerics/" in run.report.read_text()


@pytest.mark.parametrize("trained", [True, False])
def test_evaluations_get_a_report_and_no_picture_of_a_training(
    trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures: list[Path] = []
    monkeypatch.setattr("quantexp.analysis.report.write.write_report", lambda *_: None)
    monkeypatch.setattr(after_run, "draw_sweep", lambda _, picture: pictures.append(picture))
    console = Console(file=io.StringIO(), width=200)
    listing = tmp_path / "list.json"
    report_sweep(listing, [AutoDraw.quick] * 2, console, trained=trained)
    assert pictures == [tmp_path / "list.png"] * trained
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("report ")


def test_skipped_evaluation_gets_its_own_figures_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "tiny_synthetic_mxfp8_evaluated-1")
    run.root.mkdir()
    run.config.write_text("evaluate: {only: true}\nquant: {name: linear_mxfp8}\n")
    one = {"tokens": 9, "documents": 9, "loss": 2.5, "bf16_loss": 2.0, "difference": 0.5}
    write_evaluation(run, one | {"interval": [0.4, 0.6]}, [], [])
    reports: list[Path] = []
    monkeypatch.setattr(
        "quantexp.analysis.report.write.write_report", lambda _, out, __: reports.append(out)
    )
    draw_skipped(run, AutoDraw.quick, Console(file=io.StringIO()))
    assert reports == [run.root]
    assert {file.name for file in run.figures.iterdir()} == {"evaluation.png", "evaluation.pdf"}
