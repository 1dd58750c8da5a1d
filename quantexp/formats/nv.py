"""NVFP4: blocks along one axis with an 8-bit float scale each, under one scale per tensor.

For a tensor scale t (see `tensor_scale`) and a block x of extent K, in float32, with each operation rounded once:

    b = e4m3(max |x| / 6 / t)      d = b t      q = round(clamp(|x| / d, 6))      y = sign(x) q d

6 is the element's largest value. With `pre_scale`, 3/4 |x| / d is clamped and rounded (the product is rounded to
float32), so that y represents 3/4 x. b is rounded to nearest even, between the smallest and the largest positive value
of E4M3, 2^-9 and 448: a zero block also has 2^-9. If t is a power of two, everything except the two roundings to a grid
is exact. A NaN or an Inf anywhere in a block makes the whole block NaN. Signed zeros keep their sign.
Source: arXiv 2509.25149.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.bits import EXPONENT_MASK, from_bits
from quantexp.formats.layout import Scratch, chunk_limit, chunks
from quantexp.formats.mx import PRE_SCALE, block_amax_bits, scratch_size, write_signed
from quantexp.formats.rounding import round_element, round_magnitudes
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Element, Format


def quantise_nv(
    x_ONI: Tensor,
    y_ONI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_ONI: Tensor | None = None,
) -> None:
    """Write the quantised x to y, which may be x itself; `scale` is t, None means 1.

    `random_ONI` is for stochastic rounding, see `rounding`.
    """
    limit = chunk_limit(x_ONI.device)
    scratch = Scratch(scratch_size(x_ONI, spec.block, limit), x_ONI.device)
    o, n, i = x_ONI.shape
    for chunk in chunks((o, n, i), spec.block, limit):
        random = None if random_ONI is None else chunk.elements(random_ONI)
        q, signed, block_scale = scaled_magnitudes(
            chunk.elements(x_ONI), spec, scale, random, scratch
        )
        q.mul_(total_scale(block_scale, scale))
        write_signed(q, signed, chunk.elements(y_ONI))


def scaled_magnitudes(
    x_OBKI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_OBKI: Tensor | None,
    scratch: Scratch,
) -> tuple[Tensor, Tensor, Tensor]:
    """|x| / d on the element's grid, x in float32 for its sign, and the block scales b.

    The first is a scratch buffer, the second another, or x itself. b is float32, with extent 1 along K; for a block
    with NaN or Inf, b and the first are NaN.
    """
    element = spec.fmt.element
    x32, q, magic = scratch.of_shape(x_OBKI.shape)
    x32 = x_OBKI if x_OBKI.dtype == torch.float32 else x32.copy_(x_OBKI)
    amax_bits = block_amax_bits(x32, q)
    block_scale = block_scales(amax_bits, spec.fmt, scale)
    block_scale.masked_fill_(amax_bits >= EXPONENT_MASK, math.nan)
    q.div_(total_scale(block_scale, scale))
    if spec.pre_scale:
        q.mul_(PRE_SCALE)
    round_element(q.clamp_max_(element.max), element, spec.rounding, random_OBKI, magic)
    return q, x32, block_scale


def block_scales(amax_bits: Tensor, fmt: Format, scale: Tensor | None) -> Tensor:
    """b of each block, float32, from the bits of its amax; undefined if that is NaN or Inf.

    The largest value is a tensor because CUDA multiplies by the reciprocal of a Python number, which rounds twice.
    """
    assert fmt.block_scale is not None
    largest = torch.full((), fmt.element.max, dtype=torch.float32, device=amax_bits.device)
    ratio = from_bits(amax_bits) / largest
    return nearest_scale(ratio if scale is None else ratio.div_(scale), fmt.block_scale)


def nearest_scale(ratio: Tensor, element: Element) -> Tensor:
    """Positive numbers (float32, overwritten), rounded to the positive finite values of an element."""
    smallest = 2.0 ** (element.emin - element.mantissa_bits)
    ratio.clamp_(smallest, element.max)
    round_magnitudes(ratio, element, torch.empty_like(ratio))
    return ratio


def total_scale(block_scale: Tensor, scale: Tensor | None) -> Tensor:
    """The divisor of |x| and factor of the codes: b t."""
    return block_scale if scale is None else block_scale * scale
