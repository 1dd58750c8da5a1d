from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine as cosine_distance

from quantexp.capture.statistics import errors
from quantexp.capture.statistics.errors import (
    beyond_largest,
    cosine,
    error_sums,
    quantisation_error,
)
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.formats import resolve
from quantexp.formats.definitions.definition import declared_format
from tests.fake_gpu import on_fake_gpu

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fmt", "rule", "expected_db"),
    [
        ("mxfp8_e4m3", "floor", 30.65),
        ("mxfp8_e4m3", "rceil", 31.52),
        ("mxfp8_e5m2", "rceil", 25.53),
        ("mxfp4_e2m1", "floor", 18.79),
        ("mxfp4_e2m1", "rceil", 18.76),
    ],
)
def test_sqnr_of_a_normal_distribution_is_the_measured_one(
    fmt: str, rule: str, expected_db: float
) -> None:
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(3))
    measured = quantisation_error(x, resolve(fmt, scale_rule=rule), -1)
    # 0.03 dB: the reference has two decimals, and two million samples scatter by about 0.01 dB.
    assert abs(measured.sqnr_db - expected_db) < 0.03
    assert (measured.saturated_share == 0) == (rule == "rceil")


def test_bf16_rounding_of_a_normal_distribution_has_its_known_sqnr() -> None:
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(3))
    assert abs(quantisation_error(x, "bf16").sqnr_db - 55.59) < 0.03


def test_sqnr_is_the_closed_form_for_one_rounded_value() -> None:
    x = torch.tensor([[6.0, 5.5, 1.0, 0.0]])  # e2m1 at scale 1 (amax 6): 5.5 becomes 6
    q = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), -1)
    assert math.isclose(q.sqnr_db, 10 * math.log10((36 + 30.25 + 1) / 0.25), rel_tol=1e-12)


def test_underflow_is_the_share_of_non_zero_values_that_become_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, 0.2, -0.2, 1.0])  # below 0.25, half of the smallest step
    assert quantisation_error(x, "mxfp4").underflow_share == 0.5


@pytest.mark.parametrize("block", [32, "tensor"])
@pytest.mark.parametrize("can_skip", [True, False])
def test_zeros_of_a_format_without_a_zero_are_no_underflow(
    block: object, can_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_can_skip", lambda x: can_skip)
    binary = declared_format("binary", {"element": {"values": [-1, 1]}, "block": block})
    x = torch.tensor([[0.0, 1.0, -1.0, 0.5] * 16])
    assert quantisation_error(x, binary).underflow_share == 0
    assert statistics(x, chosen_for(binary, "input"))["fidelity"]["underflow_share"] == 0


def test_saturation_is_judged_at_each_blocks_own_scale() -> None:
    x = torch.ones(1, 64)
    x[0, 0] = 7.0  # amax 7: floor gives scale 1, largest 6
    x[0, 32:] *= 2.0**-20
    x[0, 40] = 7.5 * 2.0**-20
    q = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), -1)
    assert q.saturated_share == 2 / 64


def test_blocks_run_along_the_requested_axis() -> None:
    x = torch.ones(32, 64)
    x[:, 0] = 2.0**10  # along rows it drowns its block, along columns it is its own
    along_rows, along_columns = (quantisation_error(x, "mxfp4", axis) for axis in (1, 0))
    assert along_columns.sqnr_db == math.inf
    assert along_rows.underflow_share == 31 / 64


def test_hifp8_saturates_beyond_its_scaled_largest_value() -> None:
    x = torch.tensor([32768.0, 32769.0, -40000.0, 1.0])
    assert quantisation_error(x, "hifp8").saturated_share == 0.5
    assert quantisation_error(x, resolve("hifp8", scaling="current")).saturated_share == 0


def test_an_explicit_amax_decides_hifp8s_scale() -> None:
    x = torch.tensor([1.0, 2.0**15])
    spec, amax = resolve("hifp8", scaling="current"), torch.tensor(15 * 2.0**-4)
    assert quantisation_error(x, spec, amax=amax).saturated_share == 0.5


def test_a_value_that_becomes_infinite_has_minus_infinite_sqnr() -> None:
    x = torch.tensor([1.0, 50000.0])
    assert quantisation_error(x, resolve("hifp8", saturate=False)).sqnr_db == -math.inf


def test_a_block_with_nan_is_left_out_and_the_others_judged() -> None:
    x = torch.randn(4, 32)
    whole = quantisation_error(x[1:], "mxfp8")
    x[0, 0] = NAN
    assert quantisation_error(x, "mxfp8") == whole


def test_values_on_the_grid_have_infinite_sqnr() -> None:
    assert quantisation_error(torch.full((32,), 2.0), "mxfp8").sqnr_db == math.inf


@pytest.mark.parametrize("x", [torch.zeros(0, 32), torch.full((32,), NAN)])
def test_nothing_to_judge_gives_nan(x: torch.Tensor) -> None:
    assert all(math.isnan(number) for number in quantisation_error(x, "mxfp4"))


def test_all_zero_has_no_sqnr_and_no_saturation() -> None:
    q = quantisation_error(torch.zeros(64), "mxfp8")
    assert math.isnan(q.sqnr_db)
    assert math.isnan(q.underflow_share)
    assert q.saturated_share == 0


def test_a_scalar_is_a_block_of_one() -> None:
    assert quantisation_error(torch.tensor(7.0), "mxfp4").saturated_share == 1.0


def test_tiny_gradients_do_not_lose_their_squares() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    scaled = quantisation_error(x * 2.0**-90, "mxfp8")
    assert scaled._replace(mse=scaled.mse * 2.0**180) == quantisation_error(x, "mxfp8")


def test_float64_is_judged_as_float32() -> None:
    x = torch.randn(64)
    assert quantisation_error(x.double(), "mxfp8") == quantisation_error(x, "mxfp8")


def test_many_chunks_of_errors_add_up() -> None:
    x = torch.randn(300, 512)
    q = quantisation_error(x, "bf16")
    n = x.numpy().astype(np.float64)
    e = n - x.bfloat16().double().numpy()
    assert math.isclose(q.sqnr_db, 10 * math.log10((n**2).sum() / (e**2).sum()), rel_tol=1e-12)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown number format 'fp3'"):
        quantisation_error(torch.ones(2), "fp3")


def test_an_amax_without_a_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="amax has no meaning with scaling 'none'"):
        quantisation_error(torch.ones(2), "hifp8", amax=torch.ones(()))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_three_quarters_are_compared_with_three_quarters(name: str) -> None:
    """The grid under 3/4 x is as fine as 4/3 of it is under x: about 2.5 dB are lost, not all of it."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    plain = quantisation_error(x, name)
    scaled = quantisation_error(x, resolve(name, pre_scale=True))
    assert plain.sqnr_db - 4 < scaled.sqnr_db < plain.sqnr_db
    assert scaled.saturated_share == 0.0


def test_errors_are_those_that_numpy_and_scipy_compute_from_the_rounded_values() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(5)) * 2.0**-6
    x[:3, ::7] = 0
    n = x.double().numpy().ravel()
    # A scale of 2^k a block of 32, and E2M1 to nearest, by ml_dtypes: floor(log2 amax) - 2, values up to 6.
    blocks = x.numpy().astype(np.float32).reshape(-1, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)
    q = (
        (np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn) * scale)
        .astype(float)
        .ravel()
    )
    measured = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), -1)
    nonzero = n != 0
    # 1e-12: sums of 6144 float64 values in another order.
    assert math.isclose(measured.mse, ((n - q) ** 2).mean(), rel_tol=1e-12)
    assert math.isclose(1 - measured.cosine, cosine_distance(n, q), rel_tol=1e-9)
    relative = np.abs(n - q)[nonzero] / np.abs(n)[nonzero]
    assert math.isclose(measured.relative_error, relative.mean(), rel_tol=1e-12)


def test_a_tensor_that_keeps_its_direction_has_cosine_one() -> None:
    x = torch.full((2, 32), 7.0)  # at scale 1 all become 6
    q = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), -1)
    assert q.cosine == 1
    assert q.mse == 1
    assert math.isclose(q.relative_error, 1 / 7, rel_tol=1e-15)


def test_values_that_all_become_zero_have_relative_error_one_and_no_cosine() -> None:
    q = quantisation_error(torch.full((4,), 2.0**-30), "hifp8")
    assert (q.relative_error, q.underflow_share, q.sqnr_db) == (1, 1, 0)
    assert q.mse == 2.0**-60
    assert math.isnan(q.cosine)


def test_values_that_become_infinite_have_infinite_errors() -> None:
    q = quantisation_error(torch.tensor([50000.0, 1.0]), resolve("hifp8", saturate=False))
    assert (q.sqnr_db, q.mse, q.relative_error) == (-math.inf, math.inf, math.inf)
    assert math.isnan(q.cosine)


@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_without_skipping_as_on_a_gpu_all_measures_are_the_same(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    x[3, 5], x[:, ::11] = bad, 0.0
    names = ("mxfp4", "nvfp4", "hifp8")
    on_host = [quantisation_error(x, name) for name in names]
    monkeypatch.setattr(errors, "_can_skip", lambda x: False)
    for name, expected in zip(names, on_host, strict=True):
        # 1e-12: float64 sums in another order.
        assert tuple(quantisation_error(x, name)) == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_the_limit_of_fp8_is_the_largest_value_at_its_scale(name: str, largest: float) -> None:
    x = torch.tensor([0.5, -7.0, 2 * largest])
    in_scale = resolve(name, scaling="exact")
    assert beyond_largest(x, in_scale, -1).tolist() == [False] * 3
    assert beyond_largest(x, in_scale, -1, torch.tensor(6.0)).tolist() == [False, True, True]
    assert beyond_largest(x, resolve(name, scaling="none"), -1).tolist() == [False, False, True]


def test_a_cosine_is_at_most_one() -> None:
    assert cosine(1.0, 1.0, 1.0 + 2**-40) == 1.0
    assert math.isnan(cosine(1.0, 0.0, 0.0))


def test_on_a_gpu_the_errors_of_a_weight_take_few_operations_and_no_copy() -> None:
    def sums(device: torch.device) -> None:
        x = torch.empty(14336, 4096, dtype=torch.bfloat16, device=device)
        error_sums(x, x, torch.empty(x.shape, dtype=torch.bool, device=device))

    operations = on_fake_gpu(sums)
    assert not [name for name in operations if name.endswith("!")]
    # 14 chunks of 2^22 elements with some 40 operations each; 896 chunks of 2^16 would take 36,000.
    assert len(operations) < 900
