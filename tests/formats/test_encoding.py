"""Codes and scales: every code round-trips, and decoding them equals quantising."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.formats import FORMATS, decode, encode, quantise
from quantexp.formats.codes import code_values

from .tensors import assert_same, every_value

WITH_CODES = [name for name in FORMATS if name != "bf16"]


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
def test_every_finite_mx_code_comes_back(name: str) -> None:
    element = FORMATS[name].element
    values = torch.tensor(code_values(element))
    codes = torch.arange(len(values), dtype=torch.uint8)[values.isfinite()]
    beside_max = torch.stack([values[values.isfinite()], torch.full(codes.shape, element.max)], 1)
    encoded, scales = encode(beside_max, name, block=2)
    assert torch.equal(encoded[:, 0], codes)
    assert (scales == 127).all()


def test_every_nvfp4_code_comes_back_at_every_block_scale() -> None:
    """Next to 6, which determines the scale of its block; block scales below 2^-9 448 / 448 do not exist."""
    e4m3 = torch.tensor(code_values(FORMATS["fp8_e4m3"].element)[1:0x7F])
    values = torch.tensor(code_values(FORMATS["nvfp4_e2m1"].element))
    beside_max = torch.stack([values, torch.full((16,), 6.0)], 1)
    x = (beside_max[None] * e4m3[:, None, None]).contiguous()
    codes, scales = encode(x, "nvfp4", block=2, scaling="none")
    assert torch.equal(codes[..., 0], torch.arange(16, dtype=torch.uint8).expand(126, 16))
    expected = torch.arange(1, 0x7F, dtype=torch.uint8)[:, None].expand(126, 16)
    assert torch.equal(scales.block[..., 0], expected)
    assert (scales.tensor.dtype, scales.tensor.shape, scales.tensor.item()) == (
        torch.float32,
        (),
        1.0,
    )


@pytest.mark.parametrize("name", gold.FP8_ELEMENTS)
def test_every_fp8_code_comes_back(name: str) -> None:
    """All NaN codes become one, the last."""
    element = FORMATS[name].element
    values = torch.tensor(code_values(element))
    codes, scale = encode(values, name, scaling="none", saturate=False)
    expected = torch.arange(256, dtype=torch.uint8)
    expected[values.isnan()] = 0x7F
    assert torch.equal(codes, expected)
    assert (scale.dtype, scale.shape, scale.item()) == (torch.float32, (), 1.0)


def test_every_hif8_code_comes_back() -> None:
    values = torch.tensor(code_values(FORMATS["hifp8"].element))
    codes, scale = encode(values, "hifp8", saturate=False)
    assert codes.tolist() == list(range(256))
    assert (scale.dtype, scale.shape, scale.item()) == (torch.float32, (), 1.0)


@pytest.mark.parametrize("name", WITH_CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_codes_is_quantising_over_every_16_bit_value(
    name: str, dtype: torch.dtype
) -> None:
    x = every_value(dtype)
    x = x[x.float().abs().argsort(stable=True)].view(-1, 64)
    codes, scales = encode(x, name)
    assert_same(decode(codes, scales, name), quantise(x.float(), name))
    assert_same(decode(codes, scales, name, dtype=dtype), quantise(x, name))


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
@pytest.mark.parametrize("rule", gold.SCALE_RULES)
@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
def test_decoding_codes_is_quantising_over_all_of_float32(
    name: str, rule: str, rounding: str
) -> None:
    """Random bits, in blocks that share an exponent so that the elements are not all zero."""
    generator = torch.Generator().manual_seed(5)
    mantissa = torch.randint(0, 1 << 24, (256, 4, 32), generator=generator) - (1 << 23)
    exponent = torch.arange(256)[:, None, None] - torch.randint(
        0, 8, (256, 4, 32), generator=generator
    )
    bits = (exponent.clamp_min(0) << 23) | mantissa.abs() & 0x7FFFFF
    x = bits.to(torch.int32).view(torch.float32) * mantissa.sign()
    options: dict[str, Any] = {"scale_rule": rule, "rounding": rounding}
    codes, scales = encode(x, name, **options)
    assert_same(decode(codes, scales, name), quantise(x, name, **options))
    assert scales.min() == 0
    assert scales.max() == 255


@pytest.mark.parametrize("name", [name for name in FORMATS if "scaling" in FORMATS[name].options])
@pytest.mark.parametrize("scaling", ["none", "current", "exact"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_decoding_is_quantising_at_every_scale_of_the_tensor(
    name: str, scaling: str, size: float
) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(6)) * size
    x[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    for saturate in (True, False) if "saturate" in FORMATS[name].options else (True,):
        options: dict[str, Any] = {"scaling": scaling, "saturate": saturate}
        codes, scale = encode(x, name, **options)
        assert_same(decode(codes, scale, name), quantise(x, name, **options))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_scales_have_one_entry_for_each_block_of_the_axis(axis: int) -> None:
    x = torch.randn(40, 70, 33, generator=torch.Generator().manual_seed(7))
    codes, scales = encode(x, "mxfp8", axis=axis)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // 32)
    assert scales.shape == tuple(shape)
    assert_same(decode(codes, scales, "mxfp8", axis=axis), quantise(x, "mxfp8", axis=axis))
    blocks = x.movedim(axis, -1)[..., :32].abs().amax(-1)
    _, exponent = torch.frexp(blocks)
    first = scales.movedim(axis, -1)[..., 0]
    assert torch.equal(first.int(), exponent - 1 - 8 + 127)


def test_a_block_with_nan_has_the_scale_nan_and_codes_of_zero() -> None:
    x = torch.ones(3, 32)
    x[1, 5] = math.nan
    x[2, 5] = -math.inf
    codes, scales = encode(x, "mxfp4")
    assert scales.tolist() == [[125], [255], [255]]
    assert (codes[1:] == 0).all()
    assert decode(codes, scales, "mxfp4")[1:].isnan().all()
    codes, scales = encode(x, "nvfp4")
    assert scales.block.tolist() == [[0x7E, 0x7E], [0x7F, 0x7E], [0x7F, 0x7E]]
    assert (codes[1:, :16] == 0).all()
    assert decode(codes, scales, "nvfp4")[1:, :16].isnan().all()


def test_zeros_have_the_smallest_scale_and_keep_their_sign_in_the_code() -> None:
    codes, scales = encode(torch.tensor([0.0, -0.0]), "mxfp4")
    assert (codes.tolist(), scales.tolist()) == ([0x0, 0x8], [0])
    codes, scales = encode(torch.tensor([0.0, -0.0]), "nvfp4")
    assert (codes.tolist(), scales.block.tolist(), scales.tensor) == ([0x0, 0x8], [0x01], 1.0)


@pytest.mark.parametrize("name", WITH_CODES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (0, 4)])
def test_scalars_and_empty_tensors_have_codes_too(name: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    codes, scales = encode(x, name)
    assert codes.shape == x.shape
    assert_same(decode(codes, scales, name), x)


def test_non_contiguous_tensors_are_encoded_in_logical_order() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(8)).t()
    ours, theirs = encode(x, "mxfp8"), encode(x.contiguous(), "mxfp8")
    for one, other in zip(ours, theirs, strict=True):
        assert_same(torch.as_tensor(one), torch.as_tensor(other))


def test_bf16_has_no_8_bit_code() -> None:
    with pytest.raises(
        ValueError, match=r"bf16 has no 8-bit code: convert with torch's x\.to\(torch\.bfloat16\)"
    ):
        encode(torch.ones(3), "bf16")


def test_the_errors_are_those_of_quantise() -> None:
    with pytest.raises(TypeError, match=r"cannot quantise torch\.int32"):
        encode(torch.ones(3, dtype=torch.int32), "mxfp8")
    with pytest.raises(ValueError, match="hifp8 has no option block"):
        encode(torch.ones(3), "hifp8", block=32)
    with pytest.raises(ValueError, match=r"axis must lie in \[-1, 0\], got 1"):
        encode(torch.ones(3), "mxfp8", axis=1)


def test_codes_are_magnitude_codes_with_the_sign_on_top() -> None:
    x = torch.tensor([6.0, -0.5, 1.5, -6.0])
    codes, _ = encode(x, "mxfp4")
    assert np.array_equal(codes.numpy(), [0x7, 0x9, 0x3, 0xF])
