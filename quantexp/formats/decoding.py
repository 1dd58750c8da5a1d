"""Decodes codes and scales to values: the inverse of `encode`."""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.bits import MANTISSA_BITS, power_of_two
from quantexp.formats.codes import value_table
from quantexp.formats.encoding import Scales, TwoLevelScales, check_has_codes
from quantexp.formats.layout import (
    INPUT_DTYPES,
    allowed_dtypes,
    blocked_shape,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.nv import total_scale
from quantexp.formats.packing import check_packable, unpack
from quantexp.formats.spec import AnySpec, QuantSpec, resolve
from quantexp.formats.types import Element, Family, Format


@torch.no_grad()
def decode(
    codes: Tensor,
    scales: Scales,
    fmt: AnySpec,
    *,
    axis: int = -1,
    block: int | None = None,
    packed: bool = False,
    extent: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values, in the shape of the (unpacked) codes: element times 2^s for MX, element times (block scale times
    tensor scale) for NVFP4, element / scale for FP8 and HiF8.

    In float32 they are exactly the result of `quantise`; other dtypes round to nearest even. A NaN block scale makes
    its block NaN. Codes of elements of fewer than eight bits occupy the low bits of a byte.

    Args:
        codes: uint8, one code per byte, or two if `packed`.
        scales: MX: uint8, the shape of `codes` with the extent n of `axis` replaced by ceil(n / block);
            NVFP4: such a tensor and a 0-dim float32 tensor, as `TwoLevelScales` or any pair;
            FP8 and HiF8: a 0-dim float32 tensor.
        fmt: a name, a format, or a `QuantSpec`, which has the block.
        axis: MX and NVFP4: the axis that blocks run along.
        block: MX and NVFP4: elements per block; None means 32 (MX) or 16 (NVFP4).
        packed: MXFP4 and NVFP4: whether each byte contains two codes, as `encode` packs them.
        extent: if packed, the number of codes along `axis`; None means two per byte.
        dtype: bfloat16, float16 or float32.

    Raises:
        ValueError: codes or scales of another dtype or shape, codes that the element does not have, an unknown format
            or bf16, an option the format does not have, or an extent that does not match the codes.
    """
    spec = resolve(fmt, block=block)
    check_has_codes(spec.fmt)
    axis = positive_axis(axis, codes.ndim)
    codes = _unpacked(codes, spec.fmt, axis, packed, extent)
    block_scales, tensor_scale = _checked_scales(scales, codes, axis, spec)
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"cannot decode to {dtype}: must be one of {allowed_dtypes()}")
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    codes = codes.contiguous()
    if block_scales is None:
        assert tensor_scale is not None
        _decode_flat(codes, tensor_scale, values, spec.fmt.element)
    else:
        _decode_blocks(codes, block_scales.contiguous(), tensor_scale, values, axis, spec)
    return values


def _decode_flat(codes: Tensor, scale: Tensor, values: Tensor, element: Element) -> None:
    codes_N, values_N = codes.view(-1), values.view(-1)
    limit = chunk_limit(codes.device)
    for start in range(0, codes.numel(), limit):
        chunk = slice(start, start + limit)
        values_N[chunk] = _elements(codes_N[chunk], element).div_(scale)


def _decode_blocks(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    values: Tensor,
    axis: int,
    spec: QuantSpec,
) -> None:
    extents = outer_axis_inner(codes.shape, axis)
    codes_ONI, values_ONI = codes.view(extents), values.view(extents)
    scales_OBI = scales.view(outer_axis_inner(scales.shape, axis))
    for chunk in chunks(extents, spec.block, chunk_limit(codes.device)):
        scale = scale_values(chunk.scales(scales_OBI), tensor_scale, spec.fmt)
        values_OBKI = _elements(chunk.elements(codes_ONI), spec.fmt.element)
        chunk.elements(values_ONI).copy_(values_OBKI.mul_(scale))


def scale_values(scales: Tensor, tensor_scale: Tensor | None, fmt: Format) -> Tensor:
    """The factor of each block's elements, float32, in the shape of `scales` (the codes of the scales)."""
    if fmt.block_scale is None:
        return power_of_two(scales.to(torch.int32) << MANTISSA_BITS)
    return total_scale(_elements(scales, fmt.block_scale), tensor_scale)


def _elements(codes: Tensor, element: Element) -> Tensor:
    """The element of each code, float32, in the shape of `codes`."""
    index = codes.reshape(-1).to(torch.int32)
    return value_table(element, codes.device).index_select(0, index).view(codes.shape)


def _unpacked(codes: Tensor, fmt: Format, axis: int, packed: bool, extent: int | None) -> Tensor:
    """Validated codes, one per byte."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    if packed:
        check_packable(fmt)
        return unpack(codes, axis, extent)
    if extent is not None:
        raise ValueError(f"extent is for packed codes alone, got {extent}: leave it out")
    bits = fmt.element.bits
    if bits < 8 and codes.numel() and (largest := int(codes.max())) >= 1 << bits:
        raise ValueError(f"{fmt.name} has codes of {bits} bits, got {largest:#04x}")
    return codes


def _checked_scales(
    scales: Scales, codes: Tensor, axis: int, spec: QuantSpec
) -> tuple[Tensor | None, Tensor | None]:
    """Validated block scales and tensor scale; None if the format has none."""
    blocked = blocked_shape(codes.shape, axis, spec.block)
    match spec.fmt.family:
        case Family.MX:
            return _checked_scale(scales, torch.uint8, blocked), None
        case Family.NV:
            if not isinstance(scales, tuple) or len(scales) != 2:
                raise ValueError(
                    f"scales of {spec.fmt.name} must be a pair, block scales and the tensor's scale, got "
                    f"{type(scales).__name__}"
                )
            block, tensor = TwoLevelScales(*scales)
            return _checked_scale(block, torch.uint8, blocked), _checked_scale(
                tensor, torch.float32, ()
            )
        case _:
            return None, _checked_scale(scales, torch.float32, ())


def _checked_scale(scales: Scales, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(scales, Tensor):
        raise ValueError(f"scales must be {dtype} of shape {shape}, got a {type(scales).__name__}")
    if scales.dtype != dtype or tuple(scales.shape) != shape:
        raise ValueError(
            f"scales must be {dtype} of shape {shape}, got {scales.dtype} of shape {tuple(scales.shape)}"
        )
    return scales
