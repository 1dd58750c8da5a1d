"""MX and NVFP4 against torchao's reference, where it follows the definitions.

Left out, because torchao differs there: blocks with NaN or Inf; amaxes so small that the scale is
2^-127 (torchao divides by 2^-126); rceil one ulp above max 2^k, where torchao's division rounds down
to max. Of NVFP4: block scales below 2^-6, E4M3's subnormals, which torchao does not use; and values
within one float32 rounding of a tie, since torchao multiplies with a rounded reciprocal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode

from quantexp.formats import FORMATS, encode

from . import gold
from .tensors import every_finite_value

ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": mx_tensor.DTYPE_FP6_E2M3,
    "mxfp6_e3m2": mx_tensor.DTYPE_FP6_E3M2,
    "mxfp4_e2m1": torch.float4_e2m1fn_x2,
}
#: The smallest amax whose scale is above 2^-127 for every element and rule.
SMALLEST = 2.0**-109


def blocks(block: int) -> torch.Tensor:
    """All bf16 values by magnitude and shuffled, and float32 values of many sizes; no tiny amax."""
    values = every_finite_value(torch.bfloat16).float()
    by_magnitude = values[values.abs().argsort(stable=True)]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    random = torch.randn(2048, 32, generator=torch.Generator().manual_seed(2))
    random *= torch.randn(2048, 1, generator=torch.Generator().manual_seed(3)).mul(9).exp()
    x = torch.cat([by_magnitude.view(-1, block), shuffled.view(-1, block), random.view(-1, block)])
    return x[x.abs().amax(dim=-1) >= SMALLEST]


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", gold.SCALE_RULES)
def test_mx_codes_and_scales_are_torchaos(name, rule):
    x = blocks(32)
    if rule == "rceil":
        mantissa, _ = np.frexp(np.float32(FORMATS[name].element.max))
        above = np.nextafter(np.float32(mantissa), np.float32(1))
        x = x[torch.frexp(x.abs().amax(dim=-1)).mantissa != float(above)]
    codes, scales = encode(x, name, scale_rule=rule)
    theirs_scale, theirs = mx_tensor.to_mx(x, ELEMENTS[name], 32, ScaleCalculationMode(rule))
    theirs = theirs.view(torch.uint8)
    if name == "mxfp4_e2m1":
        theirs = torch.stack([theirs & 0xF, theirs >> 4], dim=-1).view(codes.shape)
    assert torch.equal(scales, theirs_scale.view(torch.uint8))
    assert torch.equal(codes, theirs)


@pytest.mark.parametrize("t", [1.0, 2.0**-20, 0.37])
def test_nvfp4_codes_and_scales_are_torchaos(t):
    x = blocks(16)
    amax = x.abs().amax(dim=-1)
    x = x[(amax / 6 / t > 2.0**-6) & (amax / 6 / t < 1e4)]
    tensor_scale = torch.tensor(t)
    codes, scales = encode(x, "nvfp4", amax=tensor_scale * 2688)
    assert scales.tensor == tensor_scale
    theirs_scale, packed = nvfp4_tensor.nvfp4_quantize(x, 16, tensor_scale)
    assert torch.equal(scales.block, theirs_scale.view(torch.uint8).view(scales.block.shape))
    theirs = torch.stack([packed & 0xF, packed >> 4], dim=-1).view(codes.shape)
    differ = codes != theirs
    d = scales.block.view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=1) * t
    ratio = (x.double().abs() / d)[differ]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    off = ((ratio[:, None] - middles) / middles).abs().amin(dim=1)
    assert (off < 2.0**-22).all()
    assert differ.double().mean() < 1e-2
