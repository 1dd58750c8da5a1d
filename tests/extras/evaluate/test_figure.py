"""The figures: which are drawn, and that they show every evaluation and every part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from quantexp.analysis.evaluation_table import Result
from quantexp.analysis.style import save_figure
from quantexp.extras.evaluate import figure
from tests.analysis.evaluation_results import result


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []

    def keep(shown: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
        figures.append(shown)
        return save_figure(shown, stem, formats)

    monkeypatch.setattr(figure, "save_figure", keep)
    return figures


def test_rows_are_ordered_by_difference(drawn: list[Figure], tmp_path: Path) -> None:
    files = figure.draw_results(
        [
            result("linear_mxfp4", 0.02),
            result("bf16", 0.0, interval=None),
            result("FA_hifp8", 0.01),
        ],
        tmp_path,
    )
    assert [file.name for file in files] == ["evaluation.png", "evaluation.pdf"]
    (ax,) = drawn[0].axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "bf16",
        "FA_hifp8",
        "linear_mxfp4",
    ]
    drawn_from = [np.asarray(line.get_xdata(), dtype=float).tolist() for line in ax.lines]
    assert pytest.approx([0.01, 0.03]) in drawn_from


def test_parts_have_a_map_for_each_evaluation(drawn: list[Figure], tmp_path: Path) -> None:
    names = [result("linear_mxfp4", modules=3), result("bf16", 0.0), result("FA_hifp8", modules=2)]
    files = figure.draw_results(names, tmp_path)
    assert [file.name for file in files[2:]] == ["evaluation_each.png", "evaluation_each.pdf"]
    *maps, _ = drawn[1].axes
    assert [ax.images[0].get_array().shape for ax in maps] == [(3, 3), (3, 2)]
    rows = [label.get_text() for label in maps[0].get_yticklabels()]
    assert rows == ["whole layer", "qkv", "fc1"]


def test_nothing_is_drawn_without_a_finite_result(tmp_path: Path) -> None:
    unknown = [Result("linear_mxfp8", "", "failed", None), result("linear_mxfp4", None)]
    assert figure.draw_results(unknown, tmp_path) == []
    assert not list(tmp_path.iterdir())
