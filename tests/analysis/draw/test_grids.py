from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantexp.analysis.draw.grids import grids_of
from quantexp.errors import CaptureError
from quantexp.formats import finite_amax, quantise

from .conftest import HIF8, MX4, MX8, linear_formats, normal

NV4 = {"format": "nvfp4_e2m1", "block": 16, "rounding": "even"}
FP8 = {"format": "fp8_e4m3", "scaling": "exact"}


def metadata(settings: dict[str, Any], **only: dict[str, Any]) -> dict[str, Any]:
    formats = only or {"fprop.x": {**settings, "axis": "input_width"}}
    return {"layer_type": "linear", "tensor": "input", "module": "fc1", "formats": formats}


def amax(x: torch.Tensor) -> float:
    return float(finite_amax(x))


@pytest.mark.parametrize("settings", [MX8, MX4, NV4], ids=lambda one: str(one["format"]))
def test_the_largest_block_lies_on_its_grid(settings: dict[str, Any]) -> None:
    x = normal(64, 96) * torch.logspace(-3, 3, 64)[:, None].bfloat16()
    largest, median = grids_of(metadata(settings), x, amax(x))
    assert largest.label.endswith("in the largest block")
    assert median.label == "median block of x fprop"
    q = quantise(x.float(), settings["format"], axis=-1, **_options(settings)).abs()
    block = settings["block"]
    row, column = divmod(int(x.abs().argmax()), x.shape[1])
    start = column // block * block
    magnitudes = torch.tensor(largest.magnitudes, dtype=torch.float64)
    values = set(q[row, start : start + block].tolist()) - {0.0}
    assert values
    for value in values:
        assert (
            float((magnitudes / value - 1).abs().min()) < 1e-6
        )  # NVFP4's product is rounded to float32
    assert max(median.magnitudes) < max(largest.magnitudes)


@pytest.mark.parametrize("settings", [HIF8, FP8], ids=lambda one: str(one["format"]))
def test_a_tensor_with_one_scale_lies_on_its_grid(settings: dict[str, Any]) -> None:
    """1 / scale is rounded to float32, as is the factor of the elements."""
    x = normal(64, 96)
    (grid,) = grids_of(metadata(settings), x, amax(x))
    q = quantise(x.float(), settings["format"], **_options(settings), amax=finite_amax(x))
    magnitudes = torch.tensor(grid.magnitudes)
    values = set(q.abs().reshape(-1).tolist()) - {0.0}
    assert values
    for value in values:
        assert float((magnitudes / value - 1).abs().min()) < 1e-6


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("format", "block")}


def test_slots_with_the_same_magnitudes_share_a_row() -> None:
    x = torch.ones(64, 64).bfloat16()
    (grid,) = grids_of(metadata(MX8, **linear_formats(MX8)), x, 1.0)
    assert grid.label == (
        "mxfp8_e4m3 in the largest block, median block of x fprop, median block of x wgrad"
    )


def test_a_transformed_operand_is_named_without_a_grid() -> None:
    slot = {**MX4, "axis": "input_width", "hadamard_block": 32}
    (grid,) = grids_of(metadata(MX4, **{"fprop.x": slot}), normal(4, 64), 3.0)
    assert (grid.label, grid.magnitudes) == ("x fprop: mxfp4_e2m1, of its Hadamard transform", ())


@pytest.mark.parametrize("abs_max", [None, 0.0])
def test_without_a_magnitude_there_is_no_grid(abs_max: float | None) -> None:
    assert grids_of(metadata(MX8), torch.zeros(4, 4), abs_max) == []


def test_a_tensor_that_no_product_quantises_has_no_grid() -> None:
    about = {**metadata(MX8), "tensor": "output"}
    assert grids_of(about, normal(4, 32), 1.0) == []
    assert grids_of({"layer_type": "linear", "tensor": "input"}, normal(4, 32), 1.0) == []


def test_a_tensor_of_another_shape_than_its_slot_is_refused() -> None:
    slot = {**MX8, "axis": 2}
    with pytest.raises(CaptureError, match="x fprop: the tensor has no axis 2"):
        grids_of(metadata(MX8, **{"fprop.x": slot}), normal(4, 32), 1.0)


def test_nonfinite_blocks_are_left_out_of_the_median() -> None:
    x = normal(4, 32)
    x[0] = math.nan
    _, median = grids_of(metadata(MX8), x, 3000.0)
    assert median.magnitudes
    assert all(math.isfinite(value) for value in median.magnitudes)
