from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped, unused-ignore]
import torch

from quantexp.analysis.measures.counted import count_values
from quantexp.capture.statistics.histogram import QUANTILES
from quantexp.capture.store.values import content_hash
from quantexp.errors import CaptureError
from tests.analysis.draw.conftest import Look, stored

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def values(dtype: torch.dtype, number: int = 30_011) -> torch.Tensor:
    x = torch.randn(number, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = x**3 * 0.02 + 0.01
    x[::7] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_numpy_and_scipy(look: Look, dtype: torch.dtype) -> None:
    """Sums in float64 of 30,000 numbers: 1e-12 is a thousand times their rounding; float64 is read as float32."""
    x = values(dtype)
    record = look(x).record
    exact = (x.float() if dtype == torch.float64 else x).double().numpy()
    assert record["mean"] == pytest.approx(exact.mean(), rel=1e-12)
    assert record["std"] == pytest.approx(exact.std(), rel=1e-12)
    assert record["skew"] == pytest.approx(scipy.stats.skew(exact), rel=1e-9)
    assert record["kurtosis"] == pytest.approx(scipy.stats.kurtosis(exact, fisher=False), rel=1e-9)
    assert (record["min"], record["max"]) == (exact.min(), exact.max())
    assert record["zero_share"] == (exact == 0).mean()
    assert (record["shape"], record["dtype"]) == ([len(x)], str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [1, 2, 3, 1001, 30_011])
def test_quantiles_are_those_of_numpy(look: Look, dtype: torch.dtype, number: int) -> None:
    """Exactly the two neighbours, then one interpolation in float64."""
    x = values(dtype, number)
    quantiles = look(x.repeat_interleave(2)[::2]).record["quantiles"]
    exact = (x.float() if dtype == torch.float64 else x).double().numpy()
    wanted = np.quantile(exact, QUANTILES)
    assert list(quantiles.values()) == pytest.approx(wanted.tolist(), rel=1e-12, abs=1e-300)


def test_float32_values_that_share_their_upper_halves_are_distinguished(look: Look) -> None:
    x = 1 + torch.arange(10_000, dtype=torch.float64).to(torch.float32) * 2.0**-23
    quantiles = look(x[torch.randperm(10_000)]).record["quantiles"]
    wanted = np.quantile(x.double().numpy(), QUANTILES)
    assert list(quantiles.values()) == pytest.approx(wanted.tolist(), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nonfinite_values_are_counted_and_left_out(look: Look, dtype: torch.dtype) -> None:
    x = values(dtype, 500)
    clean = x[3:].clone()
    x[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    looked = look(x)
    assert (looked.record["nan"], looked.record["inf"]) == (1, 2)
    wanted = np.quantile(clean.double().numpy(), QUANTILES).tolist()
    assert list(looked.record["quantiles"].values()) == pytest.approx(wanted, rel=1e-12)
    assert looked.finding == "1 NaN, 2 Inf"


@pytest.mark.parametrize(
    ("x", "finding"),
    [
        (torch.empty(0, 4), "empty"),
        (torch.zeros(4, 4).bfloat16(), "all zero"),
        (torch.full((4, 4), 0.25), "constant 0.25"),
        (torch.full((4,), math.nan), "nothing finite: 4 NaN"),
        (torch.tensor([0.25, 0.25, math.inf]), "1 Inf, constant 0.25"),
        (torch.tensor(3.0), None),
        (torch.arange(4), None),
    ],
    ids=["empty", "zero", "constant", "nan", "constant and inf", "scalar", "integers"],
)
def test_odd_tensors_have_a_finding(look: Look, x: torch.Tensor, finding: str | None) -> None:
    assert look(x).finding == finding


def test_values_that_do_not_match_their_hash_are_refused(tmp_path: Path) -> None:
    x = values(torch.bfloat16, 100)
    assert count_values(stored(tmp_path, x, hash=content_hash(x))).record["count"] == 100
    with pytest.raises(CaptureError, match="holds other values than the manifest's hash says"):
        count_values(stored(tmp_path, x, hash=content_hash(x + 1)))


@pytest.mark.parametrize(
    "x",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
    ids=["sparse", "complex", "two numbers in an element"],
)
def test_a_tensor_without_plain_numbers_is_refused(look: Look, x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="holds no plain numbers, got"):
        look(x)


def test_codes_of_scales_are_read_as_the_scales_they_encode(look: Look) -> None:
    codes = torch.tensor([127, 128, 120], dtype=torch.uint8)
    formats = {"fprop.x": {"format": "mxfp8_e4m3"}}
    looked = look(codes, tensor="input_fprop_scale", slot="fprop.x", formats=formats)
    assert looked.values.tolist() == [1, 2, 2**-7]
    assert looked.record["dtype"] == "uint8"
    with pytest.raises(CaptureError, match="scales of an unknown format"):
        look(codes, tensor="input_fprop_scale", slot="fprop.x", formats={})
