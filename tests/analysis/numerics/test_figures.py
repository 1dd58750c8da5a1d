from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.numerics.by_layer import (
    between_ranks,
    operand_heat,
    over_iterations,
    overflow,
    scale_exponents,
)
from quantexp.analysis.numerics.directions import both_axes, rows_and_columns
from quantexp.analysis.numerics.hif8_figure import (
    chosen,
    fine_magnitudes,
    hif8_of,
    hif8_tiers,
)
from quantexp.analysis.numerics.outlier_figure import heads, outliers_by_layer
from quantexp.analysis.numerics.passes import forward_and_backward, pairs
from quantexp.analysis.numerics.series import AS_DECLARED, Run, groups_of
from quantexp.capture.reader import open_capture
from tests.analysis.captures import HIF8, MX4, Capture, linear_formats

from .desks import add_run, normal, run_of


def texts(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.texts)


def line_of(ax: Axes, label_y: float) -> np.ndarray:
    """The line that begins at a height."""
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in ax.get_lines()]
    (heights,) = [ys for ys in lines if ys.size and math.isclose(ys[0], label_y)]
    return heights


@pytest.fixture
def run(capture: Capture) -> Run:
    add_run(capture, layers=3, settings=MX4, iterations=2)
    return run_of(capture)


def test_a_cell_of_a_heat_map_is_the_median_over_iterations(run: Run) -> None:
    judged = groups_of(run)[AS_DECLARED]
    figure = operand_heat(run, AS_DECLARED, judged)
    ax = figure.axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    cells = np.asarray(ax.images[0].get_array())
    values = [
        j.operand.fidelity.sqnr_db for j in judged if j.series == "wgrad.x" and j.place.layer == 1
    ]
    assert len(values) == 2
    assert cells[names.index("fc1 wgrad.x"), 1] == median(values)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1", "2"]


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_are_whole_numbers_on_an_axis(capture: Capture, layers: int) -> None:
    add_run(capture, layers=layers, settings=MX4)
    run = run_of(capture)
    figure = overflow(run, AS_DECLARED, groups_of(run)[AS_DECLARED])
    ax = figure.axes[-1]
    low, high = ax.get_xlim()
    assert [tick for tick in ax.get_xticks() if low <= tick <= high] == list(range(layers))


def test_a_line_is_the_median_of_a_layer_with_a_band_around_it(run: Run) -> None:
    judged = groups_of(run)[AS_DECLARED]
    figure = overflow(run, AS_DECLARED, judged)
    fc1 = next(ax for ax in figure.axes if ax.get_title(loc="left") == "fc1")
    shares = [
        [
            j.operand.fidelity.saturated_share
            for j in judged
            if (j.series, j.place.layer) == ("fprop.x", layer)
        ]
        for layer in range(3)
    ]
    drawn = line_of(fc1, median(shares[0]))
    assert drawn.tolist() == [median(same) for same in shares]
    assert fc1.collections


def test_iterations_are_drawn_where_there_are_several(run: Run) -> None:
    figure = over_iterations(run, groups_of(run))
    assert figure is not None
    first = replace(run, tensors=tuple(t for t in run.tensors if t.place.iteration == 1))
    assert over_iterations(first, groups_of(first)) is None


def test_ranks_are_relative_to_their_mean(capture: Capture) -> None:
    x = normal(64, 1, 64)
    for rank, factor in enumerate((1.0, 3.0)):
        line = capture.add(x * factor, "output", "fc1", 0)
        line["rank"] = rank
    capture.add(x, "weight", "fc1", 0)  # of rank 0 alone
    capture.write()
    figure = between_ranks(run_of(capture))
    assert figure is not None
    (std, _, kurtosis) = figure.axes
    # 1e-2: 3 x in bf16 is rounded to 8 bits.
    assert np.allclose(np.asarray(std.get_lines()[0].get_ydata()), [0.5, 1.5], rtol=1e-2)
    assert np.allclose(np.asarray(kurtosis.get_lines()[0].get_ydata()), [1, 1], rtol=1e-2)
    assert len(std.get_lines()) == 1


def test_a_number_that_does_not_exist_is_counted_below(capture: Capture) -> None:
    formats = linear_formats(MX4)
    capture.add(torch.zeros(32, 1, 32), "input", "fc1", 0, formats=formats)
    capture.add(normal(32, 1, 32), "input", "fc1", 1, formats=formats)
    run = run_of(capture)
    figure = overflow(run, AS_DECLARED, groups_of(run)[AS_DECLARED])
    # Zeros have no share of the non-zero elements, in either product.
    assert "2 numbers are not finite or do not exist and are not drawn" in texts(figure)
    heat = operand_heat(run, AS_DECLARED, groups_of(run)[AS_DECLARED])
    assert "hatched: no such tensor, or no finite number" in texts(heat)


def test_a_tensor_is_paired_with_its_own_gradient(run: Run) -> None:
    tensor_pairs = pairs(run.tensors)
    # Input, output and query of three layers and two iterations.
    assert len(tensor_pairs) == 3 * 2 * 3
    for pair in tensor_pairs:
        a, b = pair.tensor.place, pair.gradient.place
        assert b.tensor == f"grad_{a.tensor}"
        assert (a.module, a.layer, a.iteration) == (b.module, b.layer, b.iteration)


def test_without_a_gradient_there_is_no_forward_against_backward(capture: Capture) -> None:
    capture.add(normal(32, 1, 32), "input", formats=linear_formats(MX4))
    run = run_of(capture)
    assert forward_and_backward(run, AS_DECLARED, groups_of(run)[AS_DECLARED]) is None


def test_operands_of_the_weight_gradient_are_backward(run: Run) -> None:
    figure = forward_and_backward(run, AS_DECLARED, groups_of(run)[AS_DECLARED])
    assert figure is not None
    assert "an operand of a forward (blue) or backward (red) product" in texts(figure)
    sqnr = figure.axes[3]
    dots = sum(np.size(line.get_xdata()) for line in sqnr.get_lines())
    assert dots == len(groups_of(run)[AS_DECLARED])


def test_both_axes_are_those_of_the_same_tensor(capture: Capture) -> None:
    x = normal(64, 1, 64)
    x[:, :, ::32] *= 256
    capture.add(x, "input", formats=linear_formats(MX4))
    (axes,) = both_axes(run_of(capture))
    assert (axes.module, axes.tensor, axes.format) == ("fc1", "input", "mxfp4_e2m1 floor")
    assert axes.difference_db == axes.columns_db - axes.rows_db
    figure = rows_and_columns(run_of(capture))
    assert figure is not None
    assert "right of 0 columns lose less" in texts(figure)


def test_tensors_without_a_finite_sqnr_along_both_axes_are_counted(capture: Capture) -> None:
    capture.add(torch.ones(64, 1, 64), "input", formats=linear_formats(MX4))
    figure = rows_and_columns(run_of(capture))
    assert figure is not None
    assert "1 without a finite SQNR along both are not drawn" in texts(figure)


def test_formats_without_blocks_have_no_axes(capture: Capture) -> None:
    capture.add(normal(64, 1, 64), "input", formats=linear_formats(HIF8))
    assert rows_and_columns(run_of(capture)) is None


def test_shares_of_scale_exponents_add_up_to_one(capture: Capture) -> None:
    x = normal(64, 1, 64)
    x[0] = 0
    capture.add(x, "input", formats=linear_formats(MX4))
    run = run_of(capture)
    figure = scale_exponents(run, AS_DECLARED, groups_of(run)[AS_DECLARED])
    lines = figure.axes[0].get_lines()
    assert lines
    for line in lines:
        assert math.isclose(float(np.sum(line.get_ydata())), 1, rel_tol=1e-12)
    assert "one scale a block; 2 blocks of zeros are left out" in texts(figure)


def test_the_ratio_of_a_loud_channel_is_drawn_by_layer(capture: Capture) -> None:
    x = torch.ones(32, 1, 64)
    x[:, :, 3] = 8
    capture.add(x, "input", "fc1", 0)
    capture.add(x.sqrt(), "input", "fc1", 1)
    figure = outliers_by_layer(run_of(capture))
    assert figure is not None
    # 1e-6: the square root of 8 in float32, of 1 exactly.
    drawn = line_of(figure.axes[0], 8.0)
    assert np.allclose(drawn, [8, 8**0.5], rtol=1e-6)


def test_every_head_of_every_layer_has_a_cell(capture: Capture) -> None:
    for layer in range(2):
        q = torch.ones(16, 1, 4, 8)
        q[:, :, layer] = 4
        capture.add(q, "query", "attention", layer)
    figure = heads(run_of(capture))
    assert figure is not None
    cells = np.asarray(figure.axes[0].images[0].get_array())
    assert cells.tolist() == [[4, 1, 1, 1], [1, 4, 1, 1]]


def test_without_heads_there_is_no_figure_of_them(capture: Capture) -> None:
    capture.add(normal(32, 1, 32), "input")
    assert heads(run_of(capture)) is None


def hif8_run(capture: Capture) -> tuple[Run, list[Measured]]:
    for layer, spread in enumerate((1, 5)):
        x = normal(64, 1, 64).float() ** spread
        capture.add(x.to(torch.bfloat16), "input", "fc1", layer, formats=linear_formats(HIF8))
    capture.add(torch.zeros(64, 1, 64), "grad_output", "fc1", 0, formats=linear_formats(HIF8))
    run = run_of(capture)
    return run, list(run.tensors)


def test_hif8_is_drawn_by_tensor_with_the_worst_chosen(capture: Capture) -> None:
    run, tensors = hif8_run(capture)
    judged = hif8_of(groups_of(run)[AS_DECLARED])
    assert [(j.series, j.place.layer) for j in judged] == [
        ("input", 0),
        ("input", 1),
        ("grad_output", 0),
    ]
    (choice,) = chosen(judged)
    worst = min(tensors[:2], key=lambda one: one.operands[0].fidelity.sqnr_db)
    assert choice.judged.place == worst.place
    amax = worst.abs_max
    assert 15 / 2 < amax / 2.0**choice.scale_exponent <= 15


def test_the_bars_of_hif8s_tiers_add_up_to_one(capture: Capture) -> None:
    run, _ = hif8_run(capture)
    judged = hif8_of(groups_of(run)[AS_DECLARED])
    left = hif8_tiers(run, AS_DECLARED, judged).axes[0]
    assert [t.get_text() for t in left.get_yticklabels()] == ["fc1 input", "fc1 grad_output"]
    assert math.isclose(sum(bar.get_width() for bar in left.patches), 1, rel_tol=1e-12)  # type: ignore[attr-defined]
    assert [text.get_text() for text in left.texts] == ["no element that is not zero"]


def test_fine_magnitudes_are_numpys_in_eighths_of_an_octave(capture: Capture) -> None:
    x = normal(64, 1, 64).float()
    x[0, 0, :3] = torch.tensor([0.0, math.nan, math.inf])
    capture.add(x, "input")
    (entry,) = open_capture(capture.dir)
    n = np.abs(x.double().numpy().ravel())
    n = n[np.isfinite(n) & (n > 0)]
    bins, counts = np.unique(np.floor(8 * np.log2(n)).astype(int), return_counts=True)
    magnitudes = {b: c for b, c in fine_magnitudes(entry).items() if c}
    assert magnitudes == dict(zip(bins.tolist(), counts.tolist(), strict=True))
