"""The figures that a run draws when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quantexp.analysis.after_run import draw_figures
from quantexp.analysis.draw import verb
from quantexp.analysis.draw.arguments import Request
from quantexp.config.compose import compose
from quantexp.config.load import plain, read, save
from quantexp.errors import ConfigError
from quantexp.runs.paths import RunDir
from quantexp.schema import AutoDraw

from .conftest import Unhashed


def drawn(run: RunDir, drawing: AutoDraw) -> set[str]:
    draw_figures(run, drawing)
    return {path.name for path in run.figures.iterdir() if path.name[0] != "."}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker processes: they take seconds to start."""
    monkeypatch.setattr(verb, "num_cores", lambda: 1)


@pytest.mark.slow
def test_auto_true_draws_the_whole_tree(run: Unhashed, one_process: None) -> None:
    folder = RunDir(run.run_dir)
    names = drawn(folder, AutoDraw.everything)
    whole = {"quick_analysis.png", "tensor_stats.txt", "distributions", "heatmaps", "statistics"}
    assert whole <= names
    assert not list(folder.figures.rglob("*.pdf"))
    outcome = verb.draw(Request([str(run.run_dir)], formats=("png",), jobs=1), *_nowhere())
    assert outcome.num_known == outcome.num_tensors == 6


def _nowhere() -> tuple[Any, Callable[[str], None]]:
    from rich.console import Console

    return Console(quiet=True), lambda line: None


def test_auto_quick_draws_one_picture(run: Unhashed) -> None:
    assert drawn(RunDir(run.run_dir), AutoDraw.quick) == {"quick_analysis.png", "measures.jsonl"}


@pytest.mark.parametrize(
    ("text", "drawing"),
    [
        ("true", AutoDraw.everything),
        ("True", AutoDraw.everything),
        ("quick", AutoDraw.quick),
        ("false", AutoDraw.nothing),
    ],
)
def test_auto_takes_truth_values_and_quick(text: str, drawing: AutoDraw) -> None:
    experiment = compose([f"analysis.auto={text}"])
    assert experiment.analysis.drawing is drawing
    assert plain(experiment)["analysis"]["auto"] == text.lower()


def test_auto_is_the_same_after_saving_and_reading(tmp_path: Any) -> None:
    save(compose(["analysis.auto=true"]), tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml").analysis.drawing is AutoDraw.everything


def test_another_word_for_auto_is_refused() -> None:
    message = "analysis.auto must be quick .*, true .* or false .*, got 'some'"
    with pytest.raises(ConfigError, match=message):
        compose(["analysis.auto=some"])
