"""Elements that lie beyond the largest value of their grid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.extras.verify.cases import hard_blocks
from quantexp.formats import FORMATS, decode, encode, resolve, saturated
from quantexp.formats.codes import code_values


def largest_of(x: torch.Tensor, name: str, axis: int, **options: Any) -> torch.Tensor:
    """The largest value at each element's scale, by decoding its code."""
    codes, scales = encode(x, name, axis=axis, **options)
    element = FORMATS[name].element
    top = torch.full_like(codes, code_values(element).index(element.max))
    return decode(top, scales, name, axis=axis)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elements_beyond_the_largest_decoded_value_are_saturated(
    name: str, axis: int, dtype: torch.dtype
) -> None:
    x = torch.randn(70, 45, generator=torch.Generator().manual_seed(1)).exp().to(dtype)
    x[::3] *= -1
    rules = gold.SCALE_RULES if FORMATS[name].scale_rule else (None,)
    for rule in rules:
        options: dict[str, Any] = {"scale_rule": rule} if rule else {"scaling": "none"}
        expected = x.float().abs() > largest_of(x, name, axis, **options)
        assert torch.equal(saturated(x, resolve(name, **options), axis=axis), expected)
    for scaling in ("current", "exact") if "scaling" in FORMATS[name].options else ():
        amax = torch.tensor(1e-4)
        beyond = saturated(x, resolve(name, scaling=scaling), axis=axis, amax=amax)
        expected = x.float().abs() > largest_of(x, name, axis, scaling=scaling, amax=amax)
        assert torch.equal(beyond, expected)
        assert beyond.any()


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
@pytest.mark.parametrize("rule", gold.SCALE_RULES)
def test_blocks_at_every_size_agree_with_rational_arithmetic(name: str, rule: str) -> None:
    blocks = hard_blocks(name, rule)[::16]
    largest = gold.MX_ELEMENTS[name][3]
    expected = []
    for block in blocks:
        magnitudes = [gold.Fraction(abs(float(v))) for v in block]  # type: ignore[attr-defined]
        limit = largest * gold.Fraction(2) ** gold.mx_scale(max(magnitudes), name, rule)  # type: ignore[attr-defined]
        expected.append([m > limit for m in magnitudes])
    assert saturated(torch.from_numpy(blocks), resolve(name, scale_rule=rule)).tolist() == expected


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_three_quarters_do_not_saturate(name: str) -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    assert saturated(x, name).any()
    assert not saturated(x, resolve(name, pre_scale=True)).any()


def test_nan_and_inf_count_where_they_are_values_of_their_own() -> None:
    x = torch.tensor([7.9, 1.0, math.nan, math.inf, -math.inf])
    assert not saturated(x, "mxfp4").any()
    assert not saturated(x, "nvfp4").any()
    assert saturated(x, "fp8_e4m3").tolist() == [False, False, False, True, True]
    assert saturated(x, "bf16").tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (33,)])
def test_every_shape_is_answered(name: str, shape: tuple[int, ...]) -> None:
    assert saturated(torch.ones(shape), name).shape == shape


def test_the_errors_are_those_of_quantise() -> None:
    with pytest.raises(TypeError, match=r"cannot quantise torch\.complex64"):
        saturated(torch.ones(3, dtype=torch.complex64), "mxfp4")
    with pytest.raises(ValueError, match=r"axis must lie in \[-1, 0\], got 1"):
        saturated(torch.ones(3), "mxfp4", axis=1)
    with pytest.raises(ValueError, match="mxfp4_e2m1 has no option amax"):
        saturated(torch.ones(3), "mxfp4", amax=torch.ones(()))
    with pytest.raises(ValueError, match="mxfp8_e4m3 has no option amax"):
        saturated(torch.ones(3), resolve("mxfp8", scale_rule="rceil"), amax=torch.ones(()))
