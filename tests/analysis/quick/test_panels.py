from __future__ import annotations

import math

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from quantexp.analysis.quick import panels
from quantexp.analysis.quick.by_kind import OfKind, Range
from quantexp.analysis.scheme_style import scheme_style
from quantexp.analysis.style import BLUE, VERMILLION, new_figure
from quantexp.analysis.tensors.place import Kind
from quantexp.capture.statistics.counts import Counts
from quantexp.runs.metrics import LossCurve

RANGE = Range(2.0**-10, 2.0**-7, 448.0, True)
WEIGHTS = OfKind(
    Kind.WEIGHT,
    Counts(-3, (1, 0, 4, 3)),
    10,
    2,
    ("mxfp8_e4m3",),
    RANGE,
    (0.0, 0.001, 0.1),
    (0.0, 0.0, 0.02),
    (31.0, 31.5, 30.0),
)
QUERIES = OfKind(Kind.ATTENTION, Counts(0, (5,)), 5, 0, (), None, (), (), ())


@pytest.fixture
def ax() -> Axes:
    return new_figure(6, 4).add_subplot()


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> list[str]:
    drawn = ax.get_legend()
    return [] if drawn is None else [text.get_text() for text in drawn.get_texts()]


def filled(ax: Axes, colour: str) -> list[tuple[float, float]]:
    """The extents along x of the areas in this colour."""
    areas = [c for c in ax.collections if isinstance(c, PolyCollection)]
    boxes = [
        c.get_paths()[0].get_extents()
        for c in areas
        if to_hex(c.get_facecolor()[0]) == colour  # type: ignore[arg-type]
    ]
    return [(float(box.x0), float(box.x1)) for box in boxes]


def rows(ax: Axes) -> list[str]:
    return [tick.get_text() for tick in ax.get_yticklabels()]


def test_each_kind_is_a_row_with_its_format(ax: Axes) -> None:
    panels.draw_magnitudes(ax, [WEIGHTS, QUERIES])
    assert rows(ax) == ["weights\nmxfp8_e4m3", "q, k, v\nnot quantised"]
    assert words(ax) == ["20.0% zero"]


def test_the_histogram_lies_over_the_bins_that_have_elements(ax: Axes) -> None:
    panels.draw_magnitudes(ax, [QUERIES, WEIGHTS])
    assert filled(ax, "#4a4a4a") == [(0, 1), (-3, 1)]
    low, high = ax.get_xlim()
    assert low <= -3
    assert high >= 1


def test_the_formats_range_lies_behind_its_row_in_the_formats_colour(ax: Axes) -> None:
    panels.draw_magnitudes(ax, [WEIGHTS])
    assert filled(ax, "#0072b2") == [(-10, -7), (-7, pytest.approx(math.log2(448)))]
    assert legend(ax) == ["range at the median scale", "subnormal"]


def test_the_range_of_statistics_alone_is_labelled_with_the_largest_element(ax: Axes) -> None:
    panels.draw_magnitudes(
        ax, [OfKind(**{**vars(WEIGHTS), "range": Range(0.5, 1.0, 6.0, of_median=False)})]
    )
    assert legend(ax)[0] == "range at the scale of the largest element"


def test_an_assumed_format_is_labelled_as_assumed(ax: Axes) -> None:
    panels.draw_magnitudes(ax, [WEIGHTS], is_assumed=True)
    assert rows(ax) == ["weights\nif mxfp8_e4m3"]


def test_a_kind_with_zeros_alone_has_a_note(ax: Axes) -> None:
    zeros = OfKind(Kind.WEIGHT, Counts(), 4, 4, (), None, (), (), ())
    panels.draw_magnitudes(ax, [zeros])
    assert words(ax) == ["no finite element but zero"]


def test_shares_are_the_median_operand_and_a_line_to_the_worst(ax: Axes) -> None:
    panels.draw_shares(ax, [WEIGHTS, QUERIES])
    marks = {line.get_color(): list(line.get_xdata()) for line in ax.lines}  # type: ignore[arg-type]
    assert marks == {BLUE: [0.001], VERMILLION: [0.0]}
    ends = {
        to_hex(c.get_edgecolor()[0]).upper(): c.get_segments()[0][:, 0].tolist()  # type: ignore[arg-type,attr-defined]
        for c in ax.collections
    }
    assert ends == {BLUE: [0.001, 0.1], VERMILLION: [0.0, 0.02]}
    assert legend(ax) == ["became zero", "saturated"]
    assert words(ax) == ["not quantised"]


def test_a_kind_whose_operands_were_not_judged_has_a_note(ax: Axes) -> None:
    unjudged = OfKind(**{**vars(QUERIES), "formats": ("mxfp8_e4m3",)})
    panels.draw_shares(ax, [WEIGHTS, unjudged])
    assert words(ax) == ["no operand judged"]


def test_the_loss_is_drawn_by_iteration(ax: Axes) -> None:
    panels.draw_loss(ax, LossCurve((1, 2), (5.0, 4.0), (3, 4)), "FA_mxfp4", "d")
    assert list(ax.lines[0].get_ydata()) == [5.0, 4.0]  # type: ignore[arg-type]
    assert ax.lines[0].get_color() == scheme_style("FA_mxfp4").colour
    assert words(ax) == ["not finite: iteration 3 and 1 more"]


def test_the_baseline_is_the_neutral_line_and_both_are_named(ax: Axes) -> None:
    curve, baseline = LossCurve((1, 2), (5.0, 4.5)), LossCurve((1, 2), (5.0, 4.0))
    panels.draw_loss(ax, curve, "FA_mxfp4", "d", baseline)
    assert [line.get_color() for line in ax.lines[:2]] == [
        scheme_style("bf16").colour,
        scheme_style("FA_mxfp4").colour,
    ]
    assert list(ax.lines[0].get_ydata()) == [5.0, 4.0]  # type: ignore[arg-type]
    assert words(ax) == ["bf16", "FA_mxfp4"]


@pytest.mark.parametrize(
    ("curve", "message"),
    [(LossCurve(), "no training loss recorded"), (LossCurve((), (), (1,)), "no finite loss")],
)
def test_a_missing_loss_has_a_note(ax: Axes, curve: LossCurve, message: str) -> None:
    panels.draw_loss(ax, curve, "bf16", "d")
    assert words(ax) == [message]
