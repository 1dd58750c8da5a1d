"""The scales without the codes: those of `encode`, for every format and its options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.formats import FORMATS, TwoLevelScales, encode, resolve, scales_of

CODED = [name for name in FORMATS if name != "bf16"]


def parts(scales: torch.Tensor | TwoLevelScales) -> list[torch.Tensor]:
    return list(scales) if isinstance(scales, TwoLevelScales) else [scales]


def assert_same(x: torch.Tensor, name: str, **options: Any) -> None:
    theirs = encode(x, name, **options)[1]
    of_call = {key: options.pop(key) for key in ("axis", "amax") if key in options}
    ours = scales_of(x, resolve(name, **options), **of_call)
    assert type(ours) is type(theirs)
    for a, b in zip(parts(ours), parts(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_are_those_of_the_codes(name: str, axis: int, dtype: torch.dtype) -> None:
    x = torch.randn(70, 45, 3, generator=torch.Generator().manual_seed(1)).mul(4).exp().to(dtype)
    x[3:5] = 0.0
    x[20, 7, 1], x[60, 40, 2] = math.nan, math.inf
    for rule in gold.SCALE_RULES if FORMATS[name].scale_rule else ():
        assert_same(x, name, axis=axis, scale_rule=rule)
    for scaling in ("none", "current", "exact") if "scaling" in FORMATS[name].options else ():
        assert_same(x, name, axis=axis, scaling=scaling)
    if "scaling" in FORMATS[name].options:
        assert_same(x, name, axis=axis, scaling="delayed", amax=torch.tensor(1e-4))
    if "block" in FORMATS[name].options:
        assert_same(x.transpose(0, 1), name, axis=axis, block=8)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (33,)])
def test_every_shape_is_answered(name: str, shape: tuple[int, ...]) -> None:
    assert_same(torch.ones(shape), name)


@pytest.mark.parametrize(("rule", "byte"), [("floor", 127 + 2 - 2), ("rceil", 127)])
def test_a_block_of_sixes_has_the_scale_of_the_specification(rule: str, byte: int) -> None:
    assert (
        scales_of(torch.full((2, 40), 6.0), resolve("mxfp4", scale_rule=rule)).tolist()
        == [[byte] * 2] * 2
    )


def test_the_errors_are_those_of_encode() -> None:
    with pytest.raises(TypeError, match=r"cannot quantise torch\.complex64"):
        scales_of(torch.ones(3, dtype=torch.complex64), "mxfp4")
    with pytest.raises(ValueError, match=r"axis must lie in \[-1, 0\], got 1"):
        scales_of(torch.ones(3), "mxfp4", axis=1)
    with pytest.raises(ValueError, match="bf16 has no 8-bit code"):
        scales_of(torch.ones(3), "bf16")
