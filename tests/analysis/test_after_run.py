"""Figures and report of a skipped run, by its `analysis.auto`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.analysis.after_run import draw_skipped
from quantexp.analysis.draw import verb
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

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
    monkeypatch.setattr(verb, "allowed_cores", lambda: [0])
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
