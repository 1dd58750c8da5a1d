"""Common to all formats: shapes, strides, dtypes, out, errors; bf16; and accuracy."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from quantexp.formats import FORMATS, encode, layout, quantise
from quantexp.formats.definitions.files import shipped_formats
from quantexp.formats.types import Family

from .tensors import as_numpy, assert_same, every_value, sqnr_db

all_formats = pytest.mark.parametrize("name", FORMATS)


def normal(*shape: int, seed: int = 12) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block_by_block(x: torch.Tensor, name: str, axis: int, block: int) -> torch.Tensor:
    """Each block cut out and quantised alone."""
    parts = [
        torch.stack(
            [quantise(v, name, block=block) for v in part.reshape(-1, part.shape[-1])]
        ).view(part.shape)
        for part in x.movedim(axis, -1).split(block, dim=-1)
    ]
    return torch.cat(parts, dim=-1).movedim(-1, axis)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("block", [1, 4, 8, 16])
def test_blocks_lie_along_the_axis_and_the_last_may_be_short(axis: int, block: int) -> None:
    x = normal(5, 12, 9)
    assert_same(
        quantise(x, "mxfp4", axis=axis, block=block), block_by_block(x, "mxfp4", axis, block)
    )


def same_encoding(a: Any, b: Any) -> bool:
    """Whether codes and scales, of any kind, are equal."""
    if isinstance(a, tuple):
        return all(map(same_encoding, a, b))
    return torch.equal(a, b)


@all_formats
@pytest.mark.parametrize("limit", [1, 64, 100, 1000])
def test_the_size_of_chunks_changes_nothing(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(7, 70, 11)
    x[3, 30, 5] = float("nan")
    expected = [quantise(x, name, axis=axis) for axis in range(3)]
    codes = [] if name == "bf16" else [encode(x, name, axis=axis) for axis in range(3)]
    monkeypatch.setattr(layout, "chunk_limit", lambda device: limit)
    for module in ("families", "scale_search", "encoding", "decoding"):
        monkeypatch.setattr(f"quantexp.formats.{module}.chunk_limit", lambda device: limit)
    for axis in range(3):
        assert_same(quantise(x, name, axis=axis), expected[axis])
        if codes:
            assert same_encoding(encode(x, name, axis=axis), codes[axis])


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a (6, 8, 64) tensor with all kinds of strides."""
    spread = torch.zeros(6, 16, 64, dtype=x.dtype)
    spread[:, ::2] = x
    return {
        "contiguous": x.clone(),
        "transposed": x.transpose(0, 2).contiguous().transpose(0, 2),
        "channels last": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every second": spread[:, ::2],
        "expanded": x[:1].expand(6, 8, 64),
        "with an axis of one": x[:, :1].transpose(0, 1),
    }


@all_formats
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_strides_do_not_matter(name: str, axis: int) -> None:
    for v in views(normal(6, 8, 64)).values():
        y = quantise(v, name, axis=axis)
        assert y.shape == v.shape
        assert_same(y, quantise(v.contiguous(), name, axis=axis))


def test_a_transposed_result_is_laid_out_as_its_input() -> None:
    x = normal(64, 48).t()
    assert quantise(x, "mxfp8").stride() == x.stride()


@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 5), (0, 4), (1, 1, 1), (33,)])
def test_every_shape_keeps_its_shape_and_dtype(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.full(shape, 1.5, dtype=dtype)
    y = quantise(x, name)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert_same(y, x)


@all_formats
def test_the_input_is_left_alone(name: str) -> None:
    x = normal(4, 40)
    before = x.clone()
    y = quantise(x, name)
    assert torch.equal(x, before)
    assert y.data_ptr() != x.data_ptr()


@all_formats
@pytest.mark.parametrize("axis", [0, 1])
def test_out_is_filled_and_returned(name: str, axis: int) -> None:
    x = normal(40, 50)
    expected = quantise(x, name, axis=axis)
    for out in (torch.empty(40, 50), torch.empty(50, 40).t(), torch.empty(40, 100)[:, ::2]):
        assert quantise(x, name, axis=axis, out=out) is out
        assert_same(out, expected)
    for v in views(normal(6, 8, 64)).values():
        if v.stride()[0] == 0:
            continue
        wanted = quantise(v, name)
        assert quantise(v, name, out=v) is v
        assert_same(v, wanted)


@all_formats
def test_a_gradient_is_never_dropped_silently(name: str) -> None:
    x = normal(4, 32).requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"requires a gradient, and rounding has none: pass str.*x\.detach"
    ):
        quantise(x, name)
    with torch.no_grad():
        assert_same(quantise(x, name), quantise(x.detach(), name))


@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_straight_through_the_derivative_is_the_identity(name: str, dtype: torch.dtype) -> None:
    x = (normal(4, 40) * 1e4).to(dtype)
    x[1, 2], x[2, 3] = float("inf"), float("nan")
    weight, leaf = normal(4, 40, seed=13).to(dtype), x.clone().requires_grad_()
    y = quantise(leaf, name, straight_through=True)
    assert_same(y.detach(), quantise(x, name))
    assert_same(leaf.detach(), x)
    y.backward(weight)
    assert leaf.grad is not None
    assert_same(leaf.grad, weight)
    assert not quantise(x, name, straight_through=True).requires_grad


def test_no_gradient_passes_through_out_or_amax() -> None:
    x = normal(4, 32).requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"does not pass through out: leave out away, or pass x\.detach"
    ):
        quantise(x, "mxfp8", out=torch.empty(4, 32), straight_through=True)
    amax = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match=r"amax requires a gradient.*pass amax\.detach"):
        quantise(x.detach(), "hifp8", scaling="current", amax=amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bf16_keeps_bf16_and_rounds_fp16(dtype: torch.dtype) -> None:
    x = every_value(dtype)
    with np.errstate(invalid="ignore"):
        expected = as_numpy(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same(quantise(x, "bf16"), torch.from_numpy(expected).to(dtype))


def test_bf16_rounds_float32_to_nearest_even_subnormals_included() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(13))
    x = bits.to(torch.int32).view(torch.float32)
    subnormal = torch.arange(-(1 << 17), 1 << 17).to(torch.int32).view(torch.float32)
    for values in (x, subnormal):
        with np.errstate(invalid="ignore", over="ignore"):
            expected = values.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
        assert_same(quantise(values, "bf16"), expected)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.uint8, torch.complex64, torch.bool]
)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    words = (
        rf"cannot quantise {dtype}: must be one of torch\.bfloat16, torch\.float16, torch\.float32"
    )
    with pytest.raises(TypeError, match=words):
        quantise(torch.ones(3).to(dtype), "mxfp8")


@all_formats
@pytest.mark.parametrize(
    ("shape", "axis", "words"),
    [
        ((2, 3), 2, r"axis must lie in \[-2, 1\], got 2"),
        ((2, 3), -3, r"axis must lie in \[-2, 1\], got -3"),
        ((), 1, r"axis must lie in \[-1, 0\], got 1"),
    ],
)
def test_an_axis_out_of_range_is_refused(
    name: str, shape: tuple[int, ...], axis: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(shape), name, axis=axis)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (
            torch.empty(3, 2),
            r"out must have x's shape torch\.Size\(\[2, 3\]\), got torch\.Size\(\[3, 2\]\)",
        ),
        (torch.empty(2, 3).half(), r"out must have x's dtype torch\.float32, got torch\.float16"),
        (torch.empty(2, 3, device="meta"), "out must have x's device cpu, got meta"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(2, 3), "mxfp8", out=out)


def test_options_reach_the_arithmetic() -> None:
    x = normal(64, 64)
    rules = [quantise(x, "mxfp4", scale_rule=rule) for rule in ("floor", "rceil", "ceil", "even")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(rules, 2))
    assert not torch.equal(quantise(x, "mxfp4", block=64), quantise(x, "mxfp4"))


NUM_SAMPLES = 1 << 21


def samples(distribution: str) -> torch.Tensor:
    x = normal(NUM_SAMPLES)
    if distribution == "laplace":
        x = x.square().add_(normal(NUM_SAMPLES, seed=14).square()).mul_(0.5)
        x *= (
            torch.randint(0, 2, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(15)) * 2 - 1
        )
    return x


@pytest.mark.parametrize(
    ("name", "rule", "normal_db", "laplace_db"),
    [
        ("mxfp8_e4m3", "floor", 30.65, 29.97),
        ("mxfp8_e4m3", "rceil", 31.52, 31.53),
        ("mxfp8_e5m2", "floor", 25.35, 25.21),
        ("mxfp8_e5m2", "rceil", 25.53, 25.56),
        ("mxfp4_e2m1", "floor", 18.79, 17.93),
        ("mxfp4_e2m1", "rceil", 18.76, 17.58),
        ("bf16", None, 55.59, 55.61),
    ],
)
def test_the_noise_is_what_a_correct_implementation_measures(
    name: str, rule: str | None, normal_db: float, laplace_db: float
) -> None:
    """0.1 dB: the spread of the reference's own samples is below 0.02 dB."""
    for distribution, expected_db in (("normal", normal_db), ("laplace", laplace_db)):
        x = samples(distribution)
        assert sqnr_db(x, quantise(x, name, scale_rule=rule)) == pytest.approx(expected_db, abs=0.1)


@pytest.mark.parametrize(
    ("name", "normal_share", "laplace_share"),
    [("mxfp8_e4m3", 0.168, 0.205), ("mxfp8_e5m2", 0.168, 0.205), ("mxfp4_e2m1", 0.294, 0.435)],
)
def test_as_many_blocks_saturate_as_a_correct_implementation_measures(
    name: str, normal_share: float, laplace_share: float
) -> None:
    """A share of 65,536 blocks has a standard deviation of at most 0.2%; four are allowed."""
    for distribution, share in (("normal", normal_share), ("laplace", laplace_share)):
        x = samples(distribution).view(-1, 32)
        for rule, expected in (("floor", share), ("rceil", 0.0)):
            _, scales = encode(x, name, scale_rule=rule)
            largest = torch.exp2(scales.double() - 127) * FORMATS[name].element.max
            saturated = (x.abs() > largest).any(dim=-1).double().mean()
            assert float(saturated) == pytest.approx(expected, abs=0.008)


@pytest.mark.parametrize(("exponent", "db"), [(0, 31.5), (-6, 25.2), (-10, 19.7), (-18, 14.2)])
def test_unscaled_hif8_suffers_where_tensors_are_small_and_scaled_does_not(
    exponent: int, db: float
) -> None:
    x = normal(NUM_SAMPLES) * 2.0**exponent
    assert sqnr_db(x, quantise(x, "hifp8")) == pytest.approx(db, abs=0.1)
    assert sqnr_db(x, quantise(x, "hifp8", scaling="current")) > 31.0


def test_every_family_has_a_format() -> None:
    assert {fmt.family for fmt in FORMATS.values()} == set(Family) - {Family.GRID, Family.PYTHON}
    assert {fmt.family for fmt in shipped_formats().values()} == {
        Family.GRID,
        Family.MX,
        Family.FP8,
    }
