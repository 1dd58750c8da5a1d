"""Distinguishing a quantised tensor from one that is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.formats import (
    FORMATS,
    Family,
    lies_on_grid,
    quantise,
    resolve,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def normal(*shape: int, seed: int = 20, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share(on_grid: torch.Tensor) -> float:
    return float(on_grid.double().mean())


@all_dtypes
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantised_tensors_lie_on_the_grid(name: str, axis: int, dtype: torch.dtype) -> None:
    x = normal(70, 90, dtype=dtype)
    on_grid = lies_on_grid(quantise(x, name, axis=axis), name, axis=axis)
    assert on_grid.dtype == torch.bool
    assert on_grid.shape == x.shape
    assert on_grid.all()


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
@pytest.mark.parametrize("rule", gold.SCALE_RULES)
def test_tensors_quantised_away_from_zero_lie_on_the_grid_too(name: str, rule: str) -> None:
    y = quantise(normal(64, 64), name, scale_rule=rule, rounding="away")
    assert lies_on_grid(y, resolve(name, scale_rule=rule)).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_a_bf16_tensor_lies_on_no_8_bit_grid(name: str) -> None:
    """A bf16 value has at least 4 mantissa bits more than the format: 1 in 16 fits by chance.

    For FP8 with its exact scale about one in five does (see the test of scaled HiF8).
    """
    chance = 0.35 if FORMATS[name].family is Family.FP8 else 0.08
    assert share(lies_on_grid(normal(256, 256, dtype=torch.bfloat16), name)) < chance


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_blocks_along_the_other_axis_fit_nearly_but_not_wholly(name: str) -> None:
    """Scales of normal data differ by one or two, and the grids of two such scales mostly agree."""
    y = quantise(normal(256, 256, dtype=torch.bfloat16), name, axis=0)
    assert lies_on_grid(y, name, axis=0).all()
    assert 0.9 < share(lies_on_grid(y, name, axis=1)) < 1.0


def test_zeros_lie_on_every_grid() -> None:
    x = torch.tensor([0.0, -0.0])
    assert all(lies_on_grid(x, name).all() for name in FORMATS)


def test_nan_lies_on_the_grid_where_quantising_leaves_it() -> None:
    nan = math.nan
    assert lies_on_grid(torch.full((32,), nan), "mxfp8").all()
    assert lies_on_grid(torch.tensor([1.0, nan]), "mxfp8").tolist() == [False, True]
    assert lies_on_grid(torch.tensor([1.0, math.inf]), "mxfp8").tolist() == [False, False]
    for name in ("hifp8", "bf16", "fp8_e5m2"):
        assert lies_on_grid(torch.tensor([1.0, nan, math.inf]), name).all()
    assert lies_on_grid(torch.tensor([1.0, nan, math.inf]), "fp8_e4m3").tolist() == [1, 1, 0]
    assert lies_on_grid(torch.full((16,), nan), "nvfp4").all()
    assert lies_on_grid(torch.tensor([1.0, nan]), "nvfp4").tolist() == [False, True]
    assert lies_on_grid(torch.tensor([1.0, math.inf]), "nvfp4").tolist() == [False, False]


SCALED = [name for name, fmt in FORMATS.items() if "scaling" in fmt.options]


@all_dtypes
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scaling", ["current", "exact"])
@pytest.mark.parametrize("target", [None, 15.0, 224.0, 3.3])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_a_scaled_tensor_lies_on_its_grid_whatever_its_scale_was(
    dtype: torch.dtype, name: str, scaling: str, target: float | None, size: float
) -> None:
    options: dict[str, Any] = {"scaling": scaling}
    if target is not None and "amax_target" in FORMATS[name].options:
        options["amax_target"] = target
    for seed in range(10):
        x = (normal(512, seed=seed) * size).to(dtype)
        y = quantise(x, name, **options)
        assert lies_on_grid(y, resolve(name, **options)).all()


@all_dtypes
@pytest.mark.parametrize("scaling", ["current", "exact"])
def test_blocks_of_all_sizes_lie_on_nvfp4s_grid(dtype: torch.dtype, scaling: str) -> None:
    """Down to blocks whose scale is one of E4M3's subnormals, in which 6 need not be an element."""
    x = normal(512, 48) * torch.linspace(0, 14, 512)[:, None].neg().exp2()
    y = quantise(x.to(dtype), "nvfp4", scaling=scaling)
    assert lies_on_grid(y, resolve("nvfp4", scaling=scaling)).all()
    assert lies_on_grid(y.t(), resolve("nvfp4", scaling=scaling), axis=0).all()


def test_one_element_off_is_detected_in_a_block_of_nvfp4() -> None:
    y = quantise(normal(64, 64, dtype=torch.bfloat16), "nvfp4")
    y[3, 5] = y[3].abs().max() * 0.3
    on_grid = lies_on_grid(y, "nvfp4")
    assert not on_grid[3, :16].all()
    assert on_grid[:3].all()
    assert on_grid[3, 16:].all()


def test_amax_that_rounding_carried_down_still_finds_its_scale() -> None:
    """113 is rounded to 112, which 2 s scales to 224; 9 is on the grid at s, not at 2 s."""
    y = quantise(torch.tensor([113.0, 9.0]), "hifp8", scaling="current", amax_target=224.0)
    assert y.tolist() == [112.0, 9.0]
    assert quantise(y, "hifp8", scaling="current", amax_target=224.0).tolist() == [112.0, 10.0]
    assert lies_on_grid(y, resolve("hifp8", scaling="current", amax_target=224.0)).all()


def test_amax_that_rounding_carried_up_still_finds_its_scale() -> None:
    """15.5 is rounded to 16, beyond the target, so s / 2 is tried first; 1.125 / 8 fits s only."""
    x = torch.tensor([15.5, 1.125 / 8])
    y = quantise(x, "hifp8", scaling="current", amax_target=15.5)
    assert y.tolist() == [16.0, 0.140625]
    assert lies_on_grid(y, resolve("hifp8", scaling="current", amax_target=15.5)).all()


@all_dtypes
@pytest.mark.parametrize(("scaling", "chance"), [("current", 0.1), ("exact", 0.35)])
def test_an_unquantised_tensor_fits_a_scaled_hif8_grid_by_chance_only(
    dtype: torch.dtype, scaling: str, chance: float
) -> None:
    """Exact scaling tolerates 2^-7 of a bf16 value in either direction, of steps of 2^-3 to 2^-4: 12 to 25%."""
    x = normal(10_000, dtype=dtype)
    assert share(lies_on_grid(x, resolve("hifp8", scaling=scaling))) < chance


@pytest.mark.parametrize("scaling", ["current", "exact"])
def test_a_shard_needs_the_amax_of_the_whole(scaling: str) -> None:
    whole = normal(2, 300)
    whole[1] *= 999
    y = quantise(whole, "hifp8", scaling=scaling)
    amax = y.abs().max()
    assert lies_on_grid(y[0], resolve("hifp8", scaling=scaling), amax=amax).all()


def test_the_errors_are_those_of_quantise() -> None:
    with pytest.raises(TypeError, match=r"cannot quantise torch\.int64"):
        lies_on_grid(torch.ones(3, dtype=torch.int64), "mxfp8")
    with pytest.raises(ValueError, match=r"axis must lie in \[-1, 0\], got 1"):
        lies_on_grid(torch.ones(3), "mxfp8", axis=1)
    with pytest.raises(ValueError, match="bf16 has no option amax"):
        lies_on_grid(torch.ones(3), "bf16", amax=torch.ones(()))
    with pytest.raises(ValueError, match="mxfp8_e4m3 has no option amax"):
        lies_on_grid(torch.ones(3), "mxfp8", amax=torch.ones(()))
