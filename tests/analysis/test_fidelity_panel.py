from __future__ import annotations

import math

import pytest
import torch
from matplotlib.axes import Axes
from quantexp.analysis.survey import survey_tensors

from quantexp.analysis.collection import read_collection
from quantexp.analysis.fidelity_panel import draw_fidelity
from quantexp.analysis.scheme_style import FORMAT_COLOURS
from quantexp.analysis.style import new_figure

from .captures import HIF8, MX4, MX8, Capture, linear_formats


@pytest.fixture
def ax() -> Axes:
    return new_figure(6, 4).add_subplot()


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> list[str]:
    drawn = ax.get_legend()
    return [] if drawn is None else [text.get_text() for text in drawn.get_texts()]


def test_every_operand_has_its_name_and_every_format_its_colour(ax: Axes, capture: Capture) -> None:
    for module, settings in (("qkv", MX8), ("proj", MX4), ("fc1", HIF8)):
        x = torch.randn(64, 64)
        capture.add(x, "input", module, formats=linear_formats(settings))
    survey = survey_tensors(capture.dir, read_collection(capture.dir))
    draw_fidelity(ax, survey.operands, captured=True)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["x fprop", "x wgrad"] * 3
    assert words(ax) == ["qkv", "proj", "fc1"]
    assert legend(ax) == ["mxfp8_e4m3 rceil", "mxfp4_e2m1 floor", "hifp8 current"]
    dots = {line.get_color() for line in ax.lines if line.get_marker() == "o"}
    assert dots == {FORMAT_COLOURS[name] for name in ("mxfp8", "mxfp4", "hifp8")}


def test_an_infinite_sqnr_leaves_its_column_empty(ax: Axes, capture: Capture) -> None:
    capture.add(torch.ones(64, 64), "input", formats=linear_formats(MX8))
    survey = survey_tensors(capture.dir, read_collection(capture.dir))
    assert all(math.isinf(o.fidelity.sqnr_db) for o in survey.operands)
    draw_fidelity(ax, survey.operands, captured=True)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["x fprop", "x wgrad"]


@pytest.mark.parametrize(
    ("captured", "said"), [(True, "no quantised operand"), (False, "no tensors captured")]
)
def test_no_operands_say_why(ax: Axes, captured: bool, said: str) -> None:
    draw_fidelity(ax, [], captured=captured)
    assert words(ax) == [said]


def test_equal_errors_keep_a_small_place_on_the_axis(ax: Axes, capture: Capture) -> None:
    x = torch.randn(64, 64)
    for layer in range(3):
        capture.add(x, "input", layer=layer, formats=linear_formats(MX8))
    survey = survey_tensors(capture.dir, read_collection(capture.dir))
    draw_fidelity(ax, survey.operands, captured=True)
    low, high = ax.get_ylim()
    assert high - low == pytest.approx(6.0)
    assert len(ax.lines[0].get_xdata()) == 6
