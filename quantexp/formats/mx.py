"""MX: blocks along one axis, each with its own power-of-two scale (OCP MX v1.0 section 6.3).

For a block x of extent K, in float32, with every step exact except the rounding:

    s = rule(max |x|)        q = clamp(round(|x| 2^-s), max)        y = sign(x) q 2^s

With `pre_scale`, 3/4 |x| 2^-s is rounded (this product is also rounded to float32 if x has more than 22 significant
bits). Then y represents 3/4 x and, with the rule floor, only values beyond 8 max / 6 would saturate, of which there are
none. The scale is that of x (arXiv 2502.20586).

A NaN or an Inf anywhere in a block makes the whole block NaN. Signed zeros keep their sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.bits import (
    as_bits,
    inverse_power_of_two,
    power_of_two,
)
from quantexp.formats.layout import Scratch, chunk_limit, chunks
from quantexp.formats.mx_scale import can_saturate, scale_field
from quantexp.formats.rounding import round_element
from quantexp.formats.spec import QuantSpec

#: The factor of `pre_scale`.
PRE_SCALE = 0.75


def quantise_mx(
    x_ONI: Tensor, y_ONI: Tensor, spec: QuantSpec, random_ONI: Tensor | None = None
) -> None:
    """Write the quantised x to y, which may be x itself.

    `random_ONI` is for stochastic rounding, see `rounding`.
    """
    limit = chunk_limit(x_ONI.device)
    scratch = Scratch(scratch_size(x_ONI, spec.block, limit), x_ONI.device)
    o, n, i = x_ONI.shape
    for chunk in chunks((o, n, i), spec.block, limit):
        x_OBKI = chunk.elements(x_ONI)
        random = None if random_ONI is None else chunk.elements(random_ONI)
        q, sign, field = scaled_magnitudes(x_OBKI, spec, random, scratch)
        q.mul_(power_of_two(field))
        write_signed(q, sign, chunk.elements(y_ONI))


def scratch_size(x_ONI: Tensor, block: int, limit: int) -> int:
    """The largest number of elements of a chunk."""
    return min(x_ONI.numel(), max(limit, block))


def scaled_magnitudes(
    x_OBKI: Tensor, spec: QuantSpec, random_OBKI: Tensor | None, scratch: Scratch
) -> tuple[Tensor, Tensor, Tensor]:
    """|x| 2^-s on the element's grid, x in float32 for its sign, and the scales' exponent fields.

    The first is a scratch buffer, the second another, or x itself; their content in a NaN block is undefined. The
    fields have extent 1 along K.
    """
    element = spec.fmt.element
    x32, q, magic = scratch.of_shape(x_OBKI.shape)
    x32 = x_OBKI if x_OBKI.dtype == torch.float32 else x32.copy_(x_OBKI)
    amax_bits = block_amax_bits(x32, q)
    field = scale_field(amax_bits, element, spec.scale_rule)
    q.mul_(inverse_power_of_two(field))
    if spec.pre_scale:
        q.mul_(PRE_SCALE)
    round_element(q, element, spec.rounding, random_OBKI, magic)
    if can_saturate(spec.scale_rule):
        q.clamp_max_(element.max)
    return q, x32, field


def block_amax_bits(x32_OBKI: Tensor, magnitude_OBKI: Tensor) -> Tensor:
    """The bits of each block's amax, with extent 1 along K; |x| is left in `magnitude`.

    The integers order magnitudes as the floats do, with NaN above Inf above all finite values.
    """
    torch.abs(x32_OBKI, out=magnitude_OBKI)
    return as_bits(magnitude_OBKI).amax(dim=2, keepdim=True)


def write_signed(magnitude: Tensor, signed: Tensor, y: Tensor) -> None:
    """Write `magnitude`, which is overwritten, to y with the signs of `signed`, which may be y itself."""
    if y.dtype == torch.float32:
        torch.copysign(magnitude, signed, out=y)
    else:
        y.copy_(magnitude.copysign_(signed))
