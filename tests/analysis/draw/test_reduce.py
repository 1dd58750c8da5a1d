from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantexp.analysis.draw.reduce import axis_names, cells_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(10, 10), (3, 4), (4, 1)])
def test_a_cell_is_the_largest_magnitude_of_its_elements(
    dtype: torch.dtype, rows: int, columns: int
) -> None:
    x = torch.randn(10, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    cells = cells_of(x, {}, rows, columns)
    high, wide = math.ceil(10 / rows), math.ceil(9 / columns)
    values = x.float().abs().numpy()
    wanted = [
        [values[i : i + high, j : j + wide].max() for j in range(0, 9, wide)]
        for i in range(0, 10, high)
    ]
    assert cells.amax_RC.tolist() == np.array(wanted).tolist()
    assert (cells.rows_each, cells.columns_each) == (high, wide)


def test_large_tensors_are_reduced_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = cells_of(x, {}, 7, 8).amax_RC
    monkeypatch.setattr("quantexp.analysis.draw.reduce._CHUNK", 64)
    assert cells_of(x, {}, 7, 8).amax_RC.tolist() == whole.tolist()


def test_nan_and_inf_survive_in_their_cells() -> None:
    x = torch.ones(4, 4).bfloat16()
    x[0, 0], x[0, 1], x[3, 3] = math.nan, math.inf, -math.inf
    amax = cells_of(x, {}, 2, 2).amax_RC
    assert math.isnan(amax[0, 0])
    assert (amax[0, 1], amax[1, 0], amax[1, 1]) == (1, 1, math.inf)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 3, 4, 5)])
def test_every_shape_is_a_matrix(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    cells = cells_of(x, {}, 1000, 1000)
    assert cells.num_rows * cells.num_columns == x.numel()
    assert cells.amax_RC.reshape(-1).tolist() == x.abs().reshape(-1).tolist()


@pytest.mark.parametrize(
    ("layer_type", "tensor", "shape", "row", "column"),
    [
        ("linear", "input", (128, 2, 64), "token x sequence", "channel"),
        ("linear", "input", (128, 1, 64), "token", "channel"),
        ("linear", "weight", (96, 64), "output channel", "input channel"),
        ("linear", "grad_weight", (96, 64), "output channel", "input channel"),
        ("attention", "query", (128, 2, 4, 16), "token x sequence", "head x channel"),
        ("attention", "output", (128, 2, 64), "token x sequence", "channel"),
        ("attention", "attn_weights", (2, 4, 32, 32), "sequence x head x query", "key"),
        ("attention", "grad_scores", (1, 4, 32, 32), "head x query", "key"),
        ("linear", "input", (2, 3, 4, 5), "axis 0 x axis 1 x axis 2", "axis 3"),
        ("residual", "resid_mid", (128, 64), "token", "channel"),
    ],
)
def test_axes_have_their_names(
    layer_type: str, tensor: str, shape: tuple[int, ...], row: str, column: str
) -> None:
    cells = cells_of(torch.ones(shape), {"layer_type": layer_type, "tensor": tensor}, 64, 64)
    assert (cells.row_label, cells.column_label) == (row, column)


def test_unknown_tensors_have_numbered_axes() -> None:
    assert list(axis_names({}, 5)) == ["axis 0", "axis 1", "axis 2", "axis 3", "axis 4"]
