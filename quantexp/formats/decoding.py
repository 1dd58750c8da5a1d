"""The values that codes and scales stand for, the inverse of `encode`."""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.bits import MANTISSA_BITS, power_of_two
from quantexp.formats.codes import value_table
from quantexp.formats.encoding import check_has_codes
from quantexp.formats.layout import (
    INPUT_DTYPES,
    allowed_dtypes,
    blocked_shape,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.options import Options, resolve
from quantexp.formats.table import HIF8
from quantexp.formats.types import Element, Family, Format


@torch.no_grad()
def decode(
    codes: Tensor,
    scales: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    block: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values, of the shape of `codes`: element times 2^s for MX, element / scale for HiF8.

    In float32 they are exactly what `quantise` gives; other dtypes round to nearest even. A scale
    byte of 0xFF makes its block NaN. Codes of elements of fewer than eight bits lie in the low
    bits of a byte.

    Args:
        codes: uint8, one code a byte.
        scales: MX, uint8, the shape of `codes` with the extent n of `axis` replaced by
            ceil(n / block);
            HiF8, a 0-dim float32 tensor.
        fmt: a name or a format.
        axis: MX, the axis that blocks run along.
        block: MX, elements of a block; None is 32.
        dtype: bfloat16, float16 or float32.

    Raises:
        ValueError: for codes or scales of another dtype or shape, for codes that the element does
            not have, for an unknown format or bf16, and for an option the format does not have.
    """
    options = resolve(fmt, block=block)
    check_has_codes(options.fmt)
    axis = positive_axis(axis, codes.ndim)
    _check_codes(codes, options.fmt)
    _check_scales(scales, codes, axis, options)
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"cannot decode to {dtype}: must be one of {allowed_dtypes()}")
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if options.fmt.family is Family.HIF8:
        _decode_hif8(codes.contiguous(), scales, values)
    else:
        _decode_mx(codes.contiguous(), scales.contiguous(), values, axis, options)
    return values


def _decode_hif8(codes: Tensor, scale: Tensor, values: Tensor) -> None:
    codes_N, values_N = codes.view(-1), values.view(-1)
    limit = chunk_limit(codes.device)
    for start in range(0, codes.numel(), limit):
        chunk = slice(start, start + limit)
        values_N[chunk] = _elements(codes_N[chunk], HIF8).div_(scale)


def _decode_mx(codes: Tensor, scales: Tensor, values: Tensor, axis: int, options: Options) -> None:
    extents = outer_axis_inner(codes.shape, axis)
    codes_ONI, values_ONI = codes.view(extents), values.view(extents)
    scales_OBI = scales.view(outer_axis_inner(scales.shape, axis))
    for chunk in chunks(extents, options.block, chunk_limit(codes.device)):
        field = chunk.scales(scales_OBI).to(torch.int32) << MANTISSA_BITS
        values_OBKI = _elements(chunk.elements(codes_ONI), options.fmt.element)
        chunk.elements(values_ONI).copy_(values_OBKI.mul_(power_of_two(field)))


def _elements(codes: Tensor, element: Element) -> Tensor:
    """The element of each code, float32, in the shape of `codes`."""
    index = codes.reshape(-1).to(torch.int32)
    return value_table(element, codes.device).index_select(0, index).view(codes.shape)


def _check_codes(codes: Tensor, fmt: Format) -> None:
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    bits = fmt.element.bits
    if bits < 8 and codes.numel() and (largest := int(codes.max())) >= 1 << bits:
        raise ValueError(f"{fmt.name} has codes of {bits} bits, got {largest:#04x}")


def _check_scales(scales: Tensor, codes: Tensor, axis: int, options: Options) -> None:
    wanted_dtype, wanted_shape = torch.uint8, blocked_shape(codes.shape, axis, options.block)
    if options.fmt.family is Family.HIF8:
        wanted_dtype, wanted_shape = torch.float32, ()
    if scales.dtype != wanted_dtype or tuple(scales.shape) != wanted_shape:
        raise ValueError(
            f"scales must be {wanted_dtype} of shape {wanted_shape}, "
            f"got {scales.dtype} of shape {tuple(scales.shape)}"
        )
