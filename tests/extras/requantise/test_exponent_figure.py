from __future__ import annotations

import math
from pathlib import Path

import pytest

from quantexp.capture.statistics.errors import Fidelity
from quantexp.extras.requantise.candidates import formats_of
from quantexp.extras.requantise.exponent import study_points
from quantexp.extras.requantise.exponent_figure import draw_study, write_study
from quantexp.extras.requantise.passing import Work
from quantexp.extras.requantise.tally import Tally


def tally(names: list[str] | None, sqnr_db: float = 20.0) -> Tally:
    """Three tensors of x and one of g at each point; the SQNR of x is the exponent, give or take one."""
    points = study_points(formats_of(names))
    scores = Tally(Work([], points, 0))
    scores.study["x"] = [
        [Fidelity(point.exponent + more, 0.25, math.nan) for more in (-1.0, 0.0, 1.0)]
        for point in points
    ]
    scores.study["g"] = [[Fidelity(sqnr_db, 0.0, 0.5)] for _ in points]
    return scores


def test_a_curve_is_the_median_over_the_tensors() -> None:
    figure = draw_study(tally(["mxfp4"]))
    sqnr, underflow, saturated = figure.axes
    x, g, usual = sqnr.get_lines()
    assert list(x.get_xdata()) == list(x.get_ydata()) == [*range(-4, 7)]  # type: ignore[arg-type]
    assert set(g.get_ydata()) == {20.0}  # type: ignore[arg-type]
    assert list(usual.get_xdata()) == [0.0, 0.0]  # type: ignore[arg-type]
    assert set(underflow.get_lines()[0].get_ydata()) == {25.0}  # type: ignore[arg-type]
    assert [math.isnan(y) for y in saturated.get_lines()[0].get_ydata()] == [True] * 11  # type: ignore[arg-type]
    assert set(saturated.get_lines()[1].get_ydata()) == {50.0}  # type: ignore[arg-type]


def test_every_axis_has_its_name_and_unit() -> None:
    figure = draw_study(tally(None))
    assert len(figure.axes) == 3 * 9
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_title(loc="left")]
    assert titles == [fmt.name for fmt in formats_of(None)]
    first = [ax.get_ylabel() for ax in figure.axes[:3]]
    assert first == ["SQNR (dB)", "underflow (% of non-zero)", "saturated (%)"]
    named = {ax.get_xlabel() for ax in figure.axes if ax.get_xlabel()}
    assert named == {"log2(block scale / floor rule's)", "log2(what amax is brought to)"}
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["linear input x", "linear output gradient g", "what schemes do (MX: floor)"]


@pytest.mark.parametrize("names", [["mxfp4"], None])
def test_the_legend_of_all_operands_lies_on_no_title(names: list[str] | None) -> None:
    scores = tally(names)
    for operand in ("w", "q", "k", "P", "dS", "v", "dO"):
        scores.study[operand] = scores.study["g"]
    figure = draw_study(scores)
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    titles = [ax._left_title.get_window_extent() for ax in figure.axes if ax.get_title(loc="left")]  # type: ignore[attr-defined]
    assert box.x1 <= figure.bbox.width
    assert titles
    assert all(title.y1 <= box.y0 for title in titles)


@pytest.mark.parametrize(
    ("name", "usual"),
    [("hifp8", [15.0, 224.0]), ("fp8_e4m3", [448.0]), ("nvfp4", [2688.0])],
)
def test_a_dotted_line_marks_the_targets_of_the_schemes(name: str, usual: list[float]) -> None:
    dotted = [
        2.0 ** line.get_xdata()[0]  # type: ignore[index,operator]
        for line in draw_study(tally([name])).axes[0].get_lines()
        if line.get_linestyle() == ":"
    ]
    assert dotted == pytest.approx(usual)


@pytest.mark.parametrize("sqnr_db", [math.inf, -math.inf, math.nan])
def test_nonfinite_values_leave_a_gap(tmp_path: Path, sqnr_db: float) -> None:
    figure = draw_study(tally(["mxfp4"], sqnr_db))
    assert [math.isnan(y) for y in figure.axes[0].get_lines()[1].get_ydata()] == [True] * 11  # type: ignore[arg-type]
    png, svg = write_study(figure, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert sorted(tmp_path.iterdir()) == [png, svg]
