"""A tensor as the codes and scales that hardware would store.

Codes are one a byte, in the low bits of it where the element has fewer than eight: the sign bit,
then the magnitude as in the element's specification. MX scales are E8M0 bytes s + 127 with 0xFF
for NaN, a HiF8 scale is the float32 number that the tensor was multiplied with. `decode` turns
both back into what `quantise` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.bits import EXPONENT_MASK, MANTISSA_BITS, as_bits
from quantexp.formats.codes import hif8_code_table, value_key
from quantexp.formats.hif8 import scaled_values
from quantexp.formats.layout import (
    Scratch,
    blocked_shape,
    check_input,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.mx import scaled_magnitudes, scratch_size
from quantexp.formats.options import Options, resolve
from quantexp.formats.table import BF16
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Element, Family, Format, Rounding, ScaleRule, Scaling

_FLOAT32_EMIN = -126


@torch.no_grad()
def encode(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    scaling: Scaling | str = Scaling.NONE,
    amax_target: float | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, x's shape) and scales, by the same options as `quantise`.

    MX scales are uint8, of x's shape with the extent n of `axis` replaced by ceil(n / block); the
    codes of a block whose scale is NaN are 0. A HiF8 scale is a 0-dim float32 tensor, 1 where
    there is no scaling.

    Raises:
        ValueError: as `quantise`, and for bf16, which has no 8-bit code.
    """
    options = resolve(
        fmt,
        block=block,
        scale_rule=scale_rule,
        rounding=rounding,
        saturate=saturate,
        scaling=scaling,
        amax_target=amax_target,
        has_amax=amax is not None,
    )
    check_has_codes(options.fmt)
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    x = x.detach().contiguous()
    if options.fmt.family is Family.HIF8:
        return _encode_hif8(x, options, tensor_scale(x, options, amax))
    return _encode_mx(x, axis, options)


def check_has_codes(fmt: Format) -> None:
    """Refuse a format without 8-bit codes.

    Raises:
        ValueError: for bf16.
    """
    if fmt.element is BF16:
        raise ValueError("bf16 has no 8-bit code: convert with torch's x.to(torch.bfloat16)")


def _encode_mx(x: Tensor, axis: int, options: Options) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = codes.new_empty(blocked_shape(x.shape, axis, options.block))
    extents = outer_axis_inner(x.shape, axis)
    x_ONI, codes_ONI = x.view(extents), codes.view(extents)
    scales_OBI = scales.view(outer_axis_inner(scales.shape, axis))
    limit = chunk_limit(x.device)
    scratch = Scratch(scratch_size(x_ONI, options.block, limit), x.device)
    for chunk in chunks(extents, options.block, limit):
        q, signed, field = scaled_magnitudes(chunk.elements(x_ONI), options, scratch)
        code = _magnitude_code(q, options.fmt.element)
        code.add_(as_bits(signed).lt(0), alpha=options.fmt.element.sign_bit)
        chunk.elements(codes_ONI).copy_(code.masked_fill_(field == EXPONENT_MASK, 0))
        chunk.scales(scales_OBI).copy_(field >> MANTISSA_BITS)
    return codes, scales


def _magnitude_code(q: Tensor, element: Element) -> Tensor:
    """The codes, int32, of magnitudes q (float32, overwritten) that lie on the element's grid.

    Moved so that the element's smallest normal is float32's, the bits of q are the code and zeros
    below it.
    """
    q.mul_(2.0 ** (_FLOAT32_EMIN - element.emin))
    return as_bits(q) >> (MANTISSA_BITS - element.mantissa_bits)


def _encode_hif8(x: Tensor, options: Options, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    x_N, codes_N = x.view(-1), codes.view(-1)
    code_of = hif8_code_table(x.device)
    limit = chunk_limit(x.device)
    scratch = Scratch(min(x.numel(), limit), x.device)
    for start in range(0, x.numel(), limit):
        chunk = slice(start, start + limit)
        q = scaled_values(x_N[chunk], options, scale, scratch)
        torch.index_select(code_of, 0, value_key(q), out=codes_N[chunk])
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return codes, one if scale is None else scale
