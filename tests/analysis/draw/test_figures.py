"""Texts and marks on the figures of one tensor; how they look is for the eye."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from quantexp.analysis.draw.distribution import draw_distribution
from quantexp.analysis.draw.grids import grids_of
from quantexp.analysis.draw.heatmap import draw_heatmap
from quantexp.analysis.scheme_style import FORMAT_COLOURS
from quantexp.analysis.style import GREEN, VERMILLION, power_of_two

from .conftest import HIF8, Look, linear_formats, normal


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def distribution(look: Look, x: torch.Tensor, **metadata: Any) -> Figure:
    looked = look(x, **metadata)
    grids = grids_of(looked.entry.metadata, looked.values, looked.record["abs_max"])
    figure = draw_distribution(looked, grids, "my_run")
    figure.canvas.draw()
    return figure


def test_a_distribution_shows_its_tensor_place_and_units(look: Look) -> None:
    formats = linear_formats(HIF8)
    about = {"module": "fc1", "layer": 3, "operation": "forward", "iteration": 7, "rank": 1}
    labels = words(distribution(look, normal(64, 64), quant_type="hifp8", formats=formats, **about))
    for text in (
        "L3 fc1 forward input",
        "my_run    iteration 7    rank 1    bfloat16 64 x 64    hifp8",
        "share of elements per octave",
        "|x|",
        "standard normal quantile",
        "(x - mean) / std",
        "positive",
        "negative",
        "hifp8",
        "kurtosis",
    ):
        assert text in labels


def test_the_grid_has_the_colour_of_its_format_and_every_magnitude(look: Look) -> None:
    figure = distribution(look, normal(64, 64), formats=linear_formats(HIF8))
    rows = figure.axes[1]
    (marks,) = rows.collections
    assert tuple(marks.get_colors()[0]) == to_rgba(GREEN)  # type: ignore[attr-defined]
    assert len(marks.get_paths()) == 126  # of 256 codes, without zero, NaN and two infinities
    assert FORMAT_COLOURS["hifp8"] == GREEN


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.empty(0, 4), "empty"),
        (torch.zeros(4, 4), "all zero"),
        (torch.full((4, 4), math.nan), "nothing finite: 16 NaN"),
        (torch.full((4, 4), 0.25), "|x| is 0.25"),
        (torch.tensor([0.25, -0.25, 0.0]), "|x| is 0.25\nwherever it is not zero"),
        (torch.tensor([1.0, 1.125]), "|x| is between 1 and 1.125"),
        (torch.tensor([1.0, 2.0, 0.0, math.inf]), "not on this axis\nzero: 25.00%\nInf: 1"),
        (torch.tensor(3.0), "one value alone: no spread"),
        (torch.randn(64) ** 9, "log beyond 3"),
    ],
    ids=["empty", "zero", "nan", "constant", "sign", "one bar", "some", "scalar", "long tail"],
)
def test_odd_tensors_are_drawn_with_a_note(look: Look, x: torch.Tensor, text: str) -> None:
    if x.numel() == 64:
        x = torch.cat([x, torch.full((1000,), 1e-3)])
    assert text in words(distribution(look, x))


def test_without_formats_the_declared_one_is_unknown(look: Look) -> None:
    assert "declared format unknown" in words(distribution(look, normal(8, 8)))
    assert "no product quantises it" in words(distribution(look, normal(8, 8), formats={}))


def test_a_sample_shows_the_shape_of_the_whole(look: Look) -> None:
    sample = {"of": "rows", "axis": 0, "indices": [0], "shape": [64, 8]}
    assert "rows sampled of 64 x 8" in words(distribution(look, normal(8, 8), sample=sample))


def heatmap(look: Look, x: torch.Tensor, **metadata: Any) -> Figure:
    figure = draw_heatmap(look(x, **metadata), "my_run")
    figure.canvas.draw()
    return figure


def test_a_heatmap_names_its_axes_and_explains_its_cells(look: Look) -> None:
    labels = words(heatmap(look, normal(600, 800)))
    for text in ("token (3 to a cell)", "channel (3 to a cell)", "largest |x| of 3 x 3 elements"):
        assert text in labels
    assert "white" not in labels
    assert "|x|" in words(heatmap(look, normal(6, 8))).splitlines()


def test_zeros_are_white_and_nonfinite_values_are_vermillion(look: Look) -> None:
    x = normal(8, 8)
    x[0], x[1] = 0, math.inf
    figure = heatmap(look, x)
    assert "white: zeros alone,  red: NaN or Inf" in words(figure)
    (image,) = figure.axes[0].images
    colours = image.to_rgba(image.get_array())  # type: ignore[arg-type]
    assert np.allclose(colours[0], to_rgba("white"))
    assert np.allclose(colours[1], to_rgba(VERMILLION))
    assert not np.allclose(colours[2:], to_rgba("white"))


@pytest.mark.parametrize(
    "x",
    [torch.empty(0, 4), torch.zeros(4, 4), torch.full((2, 2), math.nan), torch.tensor(3.0)],
    ids=["empty", "zero", "nan", "scalar"],
)
def test_odd_tensors_have_a_heatmap(look: Look, x: torch.Tensor) -> None:
    finding = look(x).finding or "scalar"
    assert finding in words(heatmap(look, x))


def test_one_small_cell_does_not_take_all_contrast(look: Look) -> None:
    x = torch.ones(64, 64)
    x[0, 0], x[1, 1] = 2.0**-60, 2.0**6
    (image,) = heatmap(look, x).axes[0].images
    assert image.get_clim() == (0, 6)


def test_powers_of_two_have_superscripts() -> None:
    assert [power_of_two(e) for e in (0, -13, 25)] == ["2⁰", "2⁻¹³", "2²⁵"]
