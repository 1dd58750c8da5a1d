"""The compiled statistics against the torch code, which `test_summary` compares with numpy and the formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.capture.statistics import native
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from tests.formats.kernels.builds import compiled_for, every_build

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Sums of positive squares, of which a lane adds up to 95 in float32: 95 * 2^-24, in decibel.
SQNR_DB = 2.5e-5


@pytest.fixture(autouse=True)
def _compiles() -> None:
    assert native.kernels() is not None, "these tests need a C compiler"


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C compiled for one kind of processor, that is, for one width of vectors."""
    with compiled_for(request.param, native.kernels) as name:
        yield name


def wild(dtype: torch.dtype, *shape: int, spread: float = 6.0) -> Tensor:
    """Magnitudes over many binades, zeros of either sign, a few NaN and Inf."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randn(shape, generator=generator) * spread)
    flat = x.view(-1)
    flat[::19], flat[5::23] = 0.0, -0.0
    flat[::997], flat[400::1999], flat[800::2999] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def both(
    x: Tensor, format_name: str, tensor_name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    chosen = chosen_for(format_name, tensor_name)
    compiled = statistics(x, chosen)
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernels", lambda: None)
        return compiled, statistics(x, chosen)


def assert_alike(compiled: dict[str, Any], by_torch: dict[str, Any]) -> None:
    """Counts are equal; float64 sums were added up in another order."""
    of_compiled, of_torch = (dict(summary.pop("fidelity")) for summary in (compiled, by_torch))
    for key in ("mean", "std", "skew", "kurtosis"):
        assert compiled.pop(key) == pytest.approx(by_torch.pop(key), rel=1e-9)
    assert compiled == by_torch
    for key in ("signal", "noise", "mse"):
        assert of_compiled.pop(key) == pytest.approx(of_torch.pop(key), rel=1e-5)
    assert of_compiled.pop("sqnr_db") == pytest.approx(of_torch.pop("sqnr_db"), abs=2 * SQNR_DB)
    assert of_compiled.pop("cosine") == pytest.approx(of_torch.pop("cosine"), abs=1e-5)
    assert of_compiled == of_torch


@pytest.mark.parametrize("format_name", ["mxfp8", "mxfp4", "mxfp8_e5m2", "mxfp6_e2m3", "hifp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor_name", ["input", "value"])
def test_agrees_with_the_torch_code(
    format_name: str, dtype: torch.dtype, tensor_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = wild(dtype, 67, 5, 83, spread=2.0 if dtype == torch.float16 else 6.0)
    assert_alike(*both(x, format_name, tensor_name, monkeypatch))


def patterns(x: Tensor) -> list[int]:
    """The bits of each element; for float32, its upper half."""
    return (x.view(torch.int32) >> 16 if x.dtype == torch.float32 else x.view(torch.int16)).tolist()


@every_build
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_call_counts_every_pattern_of_its_tensor(dtype: torch.dtype, build: str) -> None:
    # Few patterns, because groups of patterns without a count are skipped. From 2^20 elements on a tensor is shared.
    kernel, x = native.kernels(), wild(dtype, 99)
    assert kernel is not None
    for part in (x, x.repeat(1 << 14), x, x[:7]):
        histogram = native.counted_values(kernel, native.Look(part))[1]
        values = histogram.values.to(torch.bfloat16 if dtype == torch.float32 else dtype)
        counts = dict(zip(patterns(values), histogram.counts.tolist(), strict=True))
        assert counts == Counter(patterns(part[part.isfinite()])), build


@pytest.mark.parametrize("tensor_name", ["input", "value"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_layout_changes_nothing(
    dtype: torch.dtype, tensor_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = wild(dtype, 96, 4, 70)
    for permuted in (x, x.transpose(0, 1), x.permute(2, 0, 1), x[::2, :, 1:]):
        assert_alike(*both(permuted, "mxfp8", tensor_name, monkeypatch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_statistics_of_a_view_are_those_of_its_elements(
    dtype: torch.dtype, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(native, "kernels", lambda: None)
    x = torch.arange(480.0).to(dtype).view(20, 4, 6)
    views = {
        "step": x.view(-1)[::2],
        "column": x[:, 1, 2],
        "element": x[3, 2, 1],
        "expanded": x[:, :1].expand(20, 9, 6),
        "one value": x[1, 1, 1].expand(70),
        "overlapping": x.as_strided((8, 5), (1, 2)),
        "lazy sign": torch._neg_view(x),
    }
    for name, view in views.items():
        elements = view.double().numpy()
        record = statistics(view, chosen_for("mxfp8", "input"))
        got = [record[key] for key in ("count", "mean", "min", "max")]
        exact = [elements.size, elements.mean(), elements.min(), elements.max()]
        assert got == pytest.approx(exact, rel=1e-12), name
        assert record["quantiles"]["0.5"] == pytest.approx(np.median(elements), rel=1 / 128), name
        assert (
            record["fidelity"]
            == statistics(torch.tensor(elements).to(dtype), chosen_for("mxfp8", "input"))[
                "fidelity"
            ]
        ), name


@pytest.mark.parametrize("exponent", [-131, -120, -90, 90, 119, 126])
@pytest.mark.parametrize("format_name", ["mxfp8", "mxfp4"])
def test_scales_at_the_ends_of_the_range_are_left_to_torch(
    exponent: int, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ldexp(torch.linspace(1, 1.99, 128), torch.tensor(exponent)).to(torch.bfloat16)
    x = torch.cat([x, torch.ones(32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.bfloat16)])
    kernel = native.kernels()
    assert kernel is not None
    for name in ("input", "value"):
        chosen = chosen_for(format_name, name)
        in_range = exponent in (-90, 90)
        shaped = x if name == "input" else x[:, None].expand(-1, 3).contiguous()
        counted = native.counted(kernel, [native.Look(shaped, chosen.spec, chosen.axis)])[0]
        assert (counted.errors is not None) == in_range
        compiled, by_torch = both(shaped, format_name, name, monkeypatch)
        assert compiled["fidelity"]["underflow_share"] == by_torch["fidelity"]["underflow_share"]
        assert compiled["fidelity"]["scale_exponents"] == by_torch["fidelity"]["scale_exponents"]


@pytest.mark.parametrize("largest", [40_000.0, 65504.0])
@pytest.mark.parametrize("format_name", ["mxfp8", "mxfp4", "mxfp6_e3m2"])
def test_float16_is_judged_in_float32_unless_it_could_become_infinite(
    largest: float, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A scale rounded up makes 65536 of 65504, which float16 does not have; 2^-24 is its smallest value.
    x = torch.cat([torch.linspace(-largest, largest, 96), torch.arange(32) * 2.0**-24]).half()
    compiled, by_torch = both(x, format_name, "input", monkeypatch)
    is_infinite = largest > 65000 and format_name == "mxfp8"  # the others round scales down
    assert (compiled["fidelity"]["mse"] is None) == is_infinite
    if largest > 65000:
        assert compiled["fidelity"] == by_torch["fidelity"]
    else:
        assert_alike(compiled, by_torch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (33,), (32, 1)])
def test_small_and_empty_tensors(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, by_torch = both(torch.ones(shape, dtype=dtype), "mxfp8", "input", monkeypatch)
    assert compiled == by_torch


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_one_odd_value(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, by_torch = both(
        torch.full((4, 64), value, dtype=dtype), "mxfp8", "input", monkeypatch
    )
    assert compiled == by_torch


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


#: Of rows, of columns in which blocks are cut off, and of small tensors among them.
MIXED = ((1040, 1056), (3, 33), (5, 260, 1000), (700,), (2, 70, 9001))


@pytest.mark.usefixtures("_threads_as_before", "build")
@every_build
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    kernel, chosen = native.kernels(), chosen_for("mxfp8", "input")
    assert kernel is not None
    looks = [native.Look(wild(dtype, *shape), chosen.spec, -1) for shape in MIXED]
    looks += [native.Look(wild(dtype, *shape), chosen.spec, 0) for shape in MIXED]
    looks += [native.Look(wild(dtype, *shape)) for shape in MIXED]
    assert any(look.x.numel() >= 1 << 20 for look in looks), "one that is shared out"
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(native.counted(kernel, looks))
    alone, *together = results
    for by_threads in together:
        for one, other in zip(alone, by_threads, strict=True):
            assert torch.equal(one.numbers, other.numbers)
            assert one.num_values == other.num_values
            assert (one.errors is None) == (other.errors is None)
            assert one.errors is None or torch.equal(one.errors, other.errors)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor_name", ["input", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_tensors_agree_with_the_torch_code(
    dtype: torch.dtype, tensor_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = wild(dtype, 3, 411, 1031, spread=2.0 if dtype == torch.float16 else 6.0)
    assert_alike(*both(x, "mxfp8", tensor_name, monkeypatch))
