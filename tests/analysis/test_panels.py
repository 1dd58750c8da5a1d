from __future__ import annotations

import pytest
import torch
from matplotlib.axes import Axes

from quantexp.analysis import panels
from quantexp.analysis.inventory import Kind, Tally
from quantexp.analysis.magnitude import MagnitudeHistogram, magnitude_histogram
from quantexp.analysis.run_record import LossCurve
from quantexp.analysis.style import KIND_COLOURS, new_figure


@pytest.fixture
def ax() -> Axes:
    return new_figure(6, 4).add_subplot()


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> list[str]:
    drawn = ax.get_legend()
    return [] if drawn is None else [text.get_text() for text in drawn.get_texts()]


def test_magnitudes_are_one_line_for_each_kind_in_its_colour(ax: Axes) -> None:
    histogram = magnitude_histogram(torch.tensor([0.0, 1.0, 2.0, 2.0]))
    panels.draw_magnitudes(ax, {Kind.WEIGHT: histogram, Kind.GRADIENT: histogram})
    assert [line.get_color() for line in ax.lines] == [
        KIND_COLOURS[Kind.WEIGHT],
        KIND_COLOURS[Kind.GRADIENT],
    ]
    assert max(ax.lines[0].get_ydata()) == 0.5
    assert legend(ax)[0] == "weights (25.0% zero)"


def test_values_beyond_the_bins_are_told(ax: Axes) -> None:
    histogram = magnitude_histogram(torch.tensor([1.0, 2.0**-60, 2.0**60, 1.0]))
    panels.draw_magnitudes(ax, {Kind.OUTPUT: histogram})
    assert legend(ax) == ["outputs (50.0% beyond the bins)"]


@pytest.mark.parametrize(
    ("magnitudes", "said"),
    [
        ({}, "no tensors captured"),
        ({Kind.INPUT: MagnitudeHistogram(nonfinite=4)}, "no finite element"),
    ],
)
def test_magnitudes_say_what_is_absent(
    ax: Axes, magnitudes: dict[Kind, MagnitudeHistogram], said: str
) -> None:
    panels.draw_magnitudes(ax, magnitudes)
    assert words(ax) == [said]


def test_all_zero_tensors_are_drawn_without_a_warning(ax: Axes) -> None:
    panels.draw_magnitudes(ax, {Kind.INPUT: magnitude_histogram(torch.zeros(4))})
    assert legend(ax) == ["inputs (100.0% zero)"]


def test_quantisation_types_are_bars_in_their_colours(ax: Axes) -> None:
    tallies = {
        "mxfp8": {Kind.INPUT: Tally(3, 5_000_000)},
        "bf16": {Kind.OUTPUT: Tally(1, 1_000_000)},
    }
    panels.draw_by_quant_type(ax, tallies)
    assert [bar.get_width() for bar in ax.patches] == [1.0, 5.0]
    assert [t.strip() for t in words(ax)] == ["1 tensor, 1 MB", "3 tensors, 5 MB"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["bf16", "mxfp8"]


def test_a_class_is_a_bar_of_kinds_that_adds_up(ax: Axes) -> None:
    tallies = {"fc1": {Kind.INPUT: Tally(1, 2_000_000), Kind.GRADIENT: Tally(2, 3_000_000)}}
    panels.draw_by_class(ax, "c", ["fc1"], tallies)
    assert sum(bar.get_width() for bar in ax.patches) == 5.0
    assert words(ax)[0].strip() == "3 tensors, 5 MB"


def test_empty_tallies_say_so(ax: Axes) -> None:
    panels.draw_by_class(ax, "c", [], {})
    assert words(ax) == ["no tensors captured"]


def test_files_of_no_bytes_are_drawn(ax: Axes) -> None:
    panels.draw_by_quant_type(ax, {"bf16": {Kind.INPUT: Tally(1, 0)}})
    assert words(ax)[0].strip() == "1 tensor, 0 MB"


def test_the_loss_is_drawn_by_iteration(ax: Axes) -> None:
    panels.draw_loss(ax, LossCurve((1, 2), (5.0, 4.0), (3, 4)))
    assert list(ax.lines[0].get_ydata()) == [5.0, 4.0]
    assert words(ax) == ["not finite: iteration 3 and 1 more"]


@pytest.mark.parametrize(
    ("curve", "said"),
    [(LossCurve(), "no training loss recorded"), (LossCurve((), (), (1,)), "no finite loss")],
)
def test_no_loss_says_why(ax: Axes, curve: LossCurve, said: str) -> None:
    panels.draw_loss(ax, curve)
    assert words(ax) == [said]
