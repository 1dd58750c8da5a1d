"""Decodes codes and scales to values: the inverse of `encode`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.formats.codes import check_packable, unpack, unpacked_shape, value_table
from quantexp.formats.encoding import (
    Scales,
    check_has_codes,
)
from quantexp.formats.families import total_scale
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import (
    INPUT_DTYPES,
    blocked_shape,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.operators import operator, spec_of, text_of, with_blocks_of_examples
from quantexp.formats.rounding import MANTISSA_BITS, power_of_two
from quantexp.formats.spec import AnySpec, QuantSpec, resolve
from quantexp.formats.torch_internals import allowed_dtypes, check_constant, check_dense, is_plain
from quantexp.formats.types import Element, Family, Format


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
        TypeError: codes or scales that are not dense tensors, or have another dtype; or another `dtype`.
        ValueError: scales of another shape, codes that the element does not have, an unknown format or bf16, an option
            the format does not have, or an extent that does not match the codes.
        RuntimeError: a derivative is needed with respect to the scale of the tensor.
    """
    check_dense(codes, "codes")
    axis = positive_axis(axis, codes.ndim)
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"cannot decode to {dtype}: must be one of {allowed_dtypes()}")
    every = list(scales) if isinstance(scales, tuple | list) else [scales]
    for part in every:
        check_dense(part, "scales")
        check_constant(part, "scales")
    of_call = axis, every, packed, extent, dtype
    if is_plain(codes, *every):
        return _decoded(codes, resolve(fmt, block=block), *of_call)
    values: Tensor = _operator(codes, text_of(fmt, block=block), *of_call)
    return values


@exact_in_pool
def _decoded(
    codes: Tensor,
    spec: QuantSpec,
    axis: int,
    scales: list[Tensor],
    packed: bool,
    extent: int | None,
    dtype: torch.dtype,
) -> Tensor:
    _checked_shape(codes, spec, axis, scales, packed, extent)
    codes = unpack(codes, axis, extent) if packed else codes
    _check_bits(codes, spec.fmt)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    codes = codes.contiguous()
    if spec.fmt.family in (Family.MX, Family.NV):
        blocks, of_tensor = scales[0].contiguous(), scales[1] if len(scales) > 1 else None
        _decode_blocks(codes, blocks, of_tensor, values, axis, spec)
    else:
        _decode_flat(codes, scales[0], values, spec.fmt.element)
    return values


def _of_operator(codes: Tensor, spec: str, *of_call: Any) -> Tensor:
    return _decoded(codes, spec_of(spec), *of_call)


def _shape_of_operator(
    codes: Tensor,
    spec: str,
    axis: int,
    scales: list[Tensor],
    packed: bool,
    extent: int | None,
    dtype: torch.dtype,
) -> Tensor:
    shape = _checked_shape(codes, spec_of(spec), axis, scales, packed, extent)
    return codes.new_empty(shape, dtype=dtype)


_operator = operator(
    "decode",
    "(Tensor codes, str spec, int axis, Tensor[] scales, bool packed, SymInt? extent, ScalarType dtype) -> Tensor",
    _of_operator,
    _shape_of_operator,
    with_blocks_of_examples,
)


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
    """The factor of each block's elements, float32, in the shape of `scales` (their codes, or the factors)."""
    if scales.is_floating_point():
        return scales
    if fmt.block_scale is None:
        return power_of_two(scales.to(torch.int32) << MANTISSA_BITS)
    return total_scale(_elements(scales, fmt.block_scale), tensor_scale)


def _elements(codes: Tensor, element: Element) -> Tensor:
    """The element of each code, float32, in the shape of `codes`."""
    index = codes.reshape(-1).to(torch.int32)
    return value_table(element, codes.device).index_select(0, index).view(codes.shape)


def _checked_shape(
    codes: Tensor,
    spec: QuantSpec,
    axis: int,
    scales: list[Tensor],
    packed: bool,
    extent: int | None,
) -> tuple[int, ...]:
    """The shape of the values; codes and scales fit each other and the specification."""
    check_has_codes(spec.fmt)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be uint8, got {codes.dtype}")
    shape = tuple(codes.shape)
    if packed:
        check_packable(spec.fmt)
        shape = unpacked_shape(shape, axis, extent)
    elif extent is not None:
        raise ValueError(f"extent is for packed codes alone, got {extent}: leave it out")
    blocked = blocked_shape(shape, axis, spec.block)
    match spec.fmt.family:
        case Family.MX:
            _check_scale(scales, torch.uint8, blocked)
        case Family.NV:
            if len(scales) != 2:
                raise TypeError(
                    f"scales of {spec.fmt.name} must be a pair, block scales and the tensor's scale, "
                    f"got {'Tensor' if len(scales) == 1 else f'{len(scales)} tensors'}"
                )
            _check_scale(scales[:1], torch.uint8, blocked)
            _check_scale(scales[1:], torch.float32, ())
        case _:
            _check_scale(scales, torch.float32, ())
    return shape


def _check_bits(codes: Tensor, fmt: Format) -> None:
    bits = fmt.element.bits
    if bits < 8 and codes.numel() and (largest := int(codes.max())) >= 1 << bits:
        raise ValueError(f"{fmt.name} has codes of {bits} bits, got {largest:#04x}")


def _check_scale(scales: list[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    wanted = f"scales must be {dtype} of shape {shape}, got"
    if len(scales) != 1:
        raise TypeError(f"{wanted} a tuple")
    (scale,) = scales
    if scale.dtype != dtype:
        raise TypeError(f"{wanted} {scale.dtype} of shape {tuple(scale.shape)}")
    if tuple(scale.shape) != shape:
        raise ValueError(f"{wanted} {scale.dtype} of shape {tuple(scale.shape)}")
