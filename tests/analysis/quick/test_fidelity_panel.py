from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from quantexp.analysis.quick.fidelity_panel import Cell, crest_grid, draw_grid, grid_of, sqnr_grid
from quantexp.analysis.quick.first_look import captured_in, first_look
from quantexp.analysis.style import new_figure

from .. import mxfp4  # noqa: TID252
from ..captures import MX4, Capture, linear_formats  # noqa: TID252
from .test_first_look import as_statistics

INF, NAN = math.inf, math.nan


@pytest.fixture
def ax() -> Axes:
    return new_figure(6, 4).add_subplot()


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def rows(ax: Axes) -> list[str]:
    return [tick.get_text() for tick in ax.get_yticklabels()]


def cell(module: str, series: str, layer: int, value: float) -> Cell:
    return Cell(module, series, layer, value, f"L{layer} {module} {series}")


def test_a_cell_is_the_sqnr_of_its_operand_along_its_axis(capture: Capture) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(64, 64, generator=generator) ** (1 + 2 * i) for i in range(2)]
    for layer, x in enumerate(tensors):
        capture.add(x, "input", layer=layer, formats=linear_formats(MX4))
    grid = sqnr_grid(first_look(captured_in(capture.dir)))
    assert grid is not None
    assert grid.rows == (("fc1", "fprop x"), ("fc1", "wgrad x"))
    assert grid.layers == ("0", "1")
    expected = [[mxfp4.sqnr_db(y) for y in (x.numpy(), x.numpy().T.copy())] for x in tensors]
    np.testing.assert_allclose(grid.values_RL, np.array(expected).T, rtol=1e-12)


def test_cells_of_statistics_without_a_format_are_the_largest_magnitude_over_rms(
    capture: Capture,
) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) ** 3
    capture.add(x, "input", formats=linear_formats(MX4))
    as_statistics(capture)
    look = first_look(captured_in(capture.dir))
    assert sqnr_grid(look) is None
    grid = crest_grid(look)
    assert grid is not None
    wide = x.double().numpy()
    expected = np.log2(np.abs(wide).max() / np.sqrt((wide**2).mean()))
    assert grid.values_RL[0, 0] == pytest.approx(expected, abs=1e-6)
    assert grid.rows == (("fc1", "input"),)


def test_experts_share_a_row_and_the_worst_of_them_is_named_with_its_number(
    capture: Capture,
) -> None:
    generator = torch.Generator().manual_seed(1)
    for expert in range(64):
        x = torch.randn(8, 64, generator=generator)
        if expert == 17:
            x[:, ::32] *= 300.0
        capture.add(
            x, "input", f"expert{expert}-fc1", formats={"fprop.x": {**MX4, "axis": "input_width"}}
        )
    for layer in range(1, 4):
        capture.add(x, "input", "fc1", layer, formats={"fprop.x": {**MX4, "axis": "input_width"}})
    grid = sqnr_grid(first_look(captured_in(capture.dir)))
    assert grid is not None
    assert grid.rows == (("expert-fc1", "fprop x"), ("fc1", "fprop x"))
    files = (torch.load(capture.dir / line["file"])["tensor"] for line in capture.lines[:64])
    sqnr_db = [mxfp4.sqnr_db(x.numpy()) for x in files]
    assert sqnr_db.index(min(sqnr_db)) == 17
    assert grid.values_RL[0, 0] == pytest.approx(sqnr_db[17], rel=1e-12)
    assert grid.worst == (("L0 expert17-fc1 fprop x", grid.values_RL[0, 0], 0, 0),)


def test_rows_go_with_the_forward_pass_and_forward_products_come_first() -> None:
    series = ("wgrad.x", "dgrad.g", "fprop.w", "fprop.x")
    cells = [cell(module, one, 0, 1.0) for module in ("fc2", "qkv") for one in series]
    grid = grid_of(cells, min, 32, 3.0)
    in_module = ["fprop x", "fprop w", "dgrad g", "wgrad x"]
    assert grid.rows == tuple((m, s) for m in ("qkv", "fc2") for s in in_module)
    assert grid.aggregated == ""


def test_too_many_rows_become_operands_and_then_modules() -> None:
    cells = [
        cell(module, series, 0, float(i))
        for module in ("qkv", "fc1")
        for i, series in enumerate(("wgrad.x", "fprop.x", "fprop.w"))
    ]
    by_operand = grid_of(cells, min, 4, 3.0)
    assert by_operand.rows == (("qkv", "x"), ("qkv", "w"), ("fc1", "x"), ("fc1", "w"))
    assert by_operand.values_RL[:, 0].tolist() == [0.0, 2.0, 0.0, 2.0]
    assert by_operand.aggregated == "the worst product of each operand"
    by_module = grid_of(cells, min, 3, 3.0)
    assert by_module.rows == (("qkv", ""), ("fc1", ""))
    assert by_module.aggregated == "the worst operand of each module"


def test_the_worst_cell_of_each_row_that_stands_out_is_listed_worst_first() -> None:
    cells = [
        cell("qkv", "fprop.x", 0, 20.0),
        cell("qkv", "fprop.x", 1, 10.0),
        cell("qkv", "fprop.w", 0, 15.0),
        cell("proj", "fprop.w", 0, 12.0),
        cell("fc1", "fprop.x", 0, NAN),
        cell("fc1", "fprop.w", 0, INF),
        cell("fc2", "fprop.x", 0, 16.0),
        cell("fc2", "fprop.w", 0, -INF),
    ]
    grid = grid_of(cells, min, 32, 3.0)
    assert (grid.typical, grid.num_more) == (15.0, 0)
    assert [(name, value) for name, value, _, _ in grid.worst] == [
        ("L0 fc2 fprop.w", -INF),
        ("L1 qkv fprop.x", 10.0),
    ]


def test_differences_below_the_margin_are_not_ranked() -> None:
    """Normal weights, whose SQNR differs by chance; then one operand far below, and two that differ by chance."""
    noise = [20.1, 19.9, 20.0, 20.15, 19.85, 20.05]
    modules = ("qkv", "proj", "fc1", "fc2", "q", "k")
    cells = [cell(m, "fprop.x", 0, db) for m, db in zip(modules, noise, strict=True)]
    assert grid_of(cells, min, 32, 3.0).worst == ()
    low = [
        *cells,
        cell("qkv", "dgrad.g", 0, 14.0),
        cell("proj", "dgrad.g", 0, 13.9),
        cell("fc1", "dgrad.g", 0, 9.0),
    ]
    names = [name for name, *_ in grid_of(low, min, 32, 3.0).worst]
    assert names == ["L0 fc1 dgrad.g", "L0 qkv dgrad.g", "L0 proj dgrad.g"]
    high = [*cells, cell("qkv", "x", 0, 21.2), cell("proj", "x", 0, 23.0)]
    assert [name for name, *_ in grid_of(high, max, 32, 1.0).worst] == ["L0 proj x", "L0 qkv x"]
    many = [
        *(cell(f"a{i}", "x", 0, 20.0) for i in range(9)),
        *(cell(f"b{i}", "x", 0, 1.0) for i in range(7)),
    ]
    grid = grid_of(many, min, 32, 3.0)
    assert (len(grid.worst), grid.num_more) == (5, 2)


def test_cells_of_few_layers_show_their_numbers_or_words(ax: Axes) -> None:
    values = {"fprop.x": 18.25, "fprop.w": INF, "dgrad.g": -INF, "wgrad.g": NAN}
    grid = grid_of(
        [cell("fc1", series, 0, value) for series, value in values.items()], min, 32, 3.0
    )
    draw_grid(ax, grid, "c", "dB", low_is_worst=True)
    assert rows(ax) == ["fprop x", "fprop w", "dgrad g", "wgrad g"]
    assert words(ax) == ["fc1", "18.2", "exact", "inf", "1"]


def test_many_layers_show_only_the_ranks_of_the_worst(ax: Axes) -> None:
    cells = [cell("fc1", "fprop.x", layer, 20.0 + layer) for layer in range(16)]
    draw_grid(ax, grid_of(cells, min, 32, 3.0), "c", "dB", low_is_worst=True)
    assert words(ax) == ["fc1", "1"]


def test_nearly_equal_numbers_look_alike(ax: Axes) -> None:
    cells = [cell("fc1", "fprop.x", layer, 20.0 + layer / 100) for layer in range(3)]
    draw_grid(ax, grid_of(cells, min, 32, 3.0), "c", "dB", low_is_worst=True)
    low, high = ax.images[0].get_clim()
    assert high - low == pytest.approx(3.0)


def test_a_single_layer_of_nothing_finite_is_drawn(ax: Axes) -> None:
    draw_grid(
        ax, grid_of([cell("fc1", "fprop.x", -1, INF)], min, 32, 3.0), "c", "dB", low_is_worst=True
    )
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["?"]
