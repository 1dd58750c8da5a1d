"""Encodes a tensor as the codes and scales that hardware would store.

A byte contains one code, in its low bits if the element has fewer than eight, or on request two codes of four bits (see
`codes`): the sign bit, then the magnitude as in the element's specification. MX scales are E8M0 bytes s + 127, with
0xFF for NaN. NVFP4 has E4M3 bytes, with 0x7F for NaN, and a float32 factor of codes and block scales. An FP8 or HiF8
scale is the float32 factor of the tensor. `decode` returns the values of `quantise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantexp.formats.codes import check_packable, hif8_code_table, pack, packed_shape, value_key
from quantexp.formats.families import (
    SCALED_VALUES,
    mx_magnitudes,
    nv_magnitudes,
    scratch_size,
    tensor_scale,
)
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import (
    Scratch,
    blocked_shape,
    chunk_limit,
    chunks,
    outer_axis_inner,
)
from quantexp.formats.operators import (
    operator,
    operator_arguments,
    spec_of,
    unsigned,
    with_blocks_of_examples,
)
from quantexp.formats.philox import random_numbers
from quantexp.formats.rounding import MAGNITUDE_MASK, MANTISSA_BITS, as_bits
from quantexp.formats.spec import AnySpec, QuantSpec, resolve
from quantexp.formats.table import BF16
from quantexp.formats.torch_internals import checked_axis, constant, is_plain
from quantexp.formats.types import Element, Family, Format, Rounding, ScaleRule, Scaling

_FLOAT32_EMIN = -126
#: Bits of a code: one byte.
_MOST_CODE_BITS = 8


class TwoLevelScales(NamedTuple):
    """NVFP4's scales: a code's value is its element times the block scale times the tensor scale."""

    #: E4M3 codes, uint8, one per block.
    block: Tensor
    #: 0-dim float32.
    tensor: Tensor


Scales = Tensor | TwoLevelScales


def encode(
    x: Tensor,
    fmt: AnySpec,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    scaling: Scaling | str | None = None,
    amax_target: float | None = None,
    amax: Tensor | None = None,
    seed: int | None = None,
    offset: int | None = None,
    pre_scale: bool | float = False,
    packed: bool = False,
) -> tuple[Tensor, Scales]:
    """Codes (uint8, x's shape) and scales; the options are those of `quantise`.

    `packed` stores two codes of MXFP4 and NVFP4 per byte, neighbours along `axis`, the first in the lower half: the
    extent n of `axis` becomes ceil(n / 2), and an odd n leaves half a byte 0.

    MX scales are uint8, of x's shape with the extent n of `axis` replaced by ceil(n / block); the codes of a block with
    a NaN scale are 0. NVFP4 has `TwoLevelScales`, with such block scales. An FP8 or HiF8 scale is a 0-dim float32
    tensor, 1 without scaling. Codes and scales have no derivative.

    Raises:
        TypeError: as for `quantise`.
        ValueError: as for `quantise`, for bf16, which has no 8-bit code, and for `packed` if codes do not have four
            bits.
    """
    options: dict[str, Any] = {
        "block": block,
        "scale_rule": scale_rule,
        "rounding": rounding,
        "saturate": saturate,
        "scaling": scaling,
        "amax_target": amax_target,
        "pre_scale": pre_scale,
    }
    axis = checked_axis(x, axis, amax)
    if is_plain(x, amax):
        spec = _checked(resolve(fmt, **options), packed)
        return _encoded(constant(x), spec, axis, amax, seed, offset, packed)
    of_call = operator_arguments(fmt, axis, amax, seed, offset, **options)
    codes, scales = _operator(x.detach(), *of_call, packed)
    return codes, of_operator(scales)


def _checked(spec: QuantSpec, packed: bool) -> QuantSpec:
    check_has_codes(spec.fmt)
    if packed:
        check_packable(spec.fmt)
    return spec


@exact_in_pool
def _encoded(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    amax: Tensor | None,
    seed: int | None,
    offset: int | None,
    packed: bool,
) -> tuple[Tensor, Scales]:
    x = x.contiguous()
    random = random_numbers(x, spec, seed, offset)
    codes, scales = _encode(x, axis, spec, tensor_scale(x, spec, amax), random)
    return (pack(codes, axis) if packed else codes), scales


def _of_operator(
    x: Tensor,
    spec: str,
    axis: int,
    amax: Tensor | None,
    seed: int | None,
    offset: int | None,
    packed: bool,
) -> tuple[Tensor, list[Tensor]]:
    codes, scales = _encoded(
        x, _checked(spec_of(spec), packed), axis, amax, unsigned(seed), unsigned(offset), packed
    )
    return codes, for_operator(scales)


def _shapes_of_operator(
    x: Tensor, spec: str, axis: int, amax: object, seed: object, offset: object, packed: bool
) -> tuple[Tensor, list[Tensor]]:
    _checked(spec_of(spec), packed)
    shape = packed_shape(tuple(x.shape), axis) if packed else tuple(x.shape)
    return x.new_empty(shape, dtype=torch.uint8), shapes_of_scales(x, spec, axis)


def for_operator(scales: Scales) -> list[Tensor]:
    """Scales as the results or arguments of an operator: a list of one or two tensors."""
    return list(scales) if isinstance(scales, tuple) else [scales]


def of_operator(scales: list[Tensor]) -> Scales:
    """The inverse of `for_operator`."""
    return TwoLevelScales(*scales) if len(scales) > 1 else scales[0]


def shapes_of_scales(x: Tensor, spec: str, axis: int) -> list[Tensor]:
    """The scales of x without values, for `operator`."""
    options = spec_of(spec)
    of_tensor = x.new_empty((), dtype=torch.float32)
    if options.fmt.family not in (Family.MX, Family.NV):
        return [of_tensor]
    blocks = x.new_empty(blocked_shape(tuple(x.shape), axis, options.block), dtype=torch.uint8)
    return [blocks] if options.fmt.family is Family.MX else [blocks, of_tensor]


_operator = operator(
    "encode",
    "(Tensor x, str spec, int axis, Tensor? amax, SymInt? seed, SymInt? offset, bool packed) -> (Tensor, Tensor[])",
    _of_operator,
    _shapes_of_operator,
    with_blocks_of_examples,
)


def _encode(
    x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None, random: Tensor | None
) -> tuple[Tensor, Scales]:
    match spec.fmt.family:
        case Family.NV:
            return _encode_nv(x, axis, spec, scale, random)
        case Family.MX:
            return _encode_mx(x, axis, spec, random)
        case _:
            return _encode_flat(x, spec, scale, random)


def check_has_codes(fmt: Format) -> None:
    """Refuse a format without 8-bit codes.

    Raises:
        ValueError: for bf16, a declared format of the family `grid`, and elements of more than 8 bits.
    """
    if fmt.element is BF16:
        raise ValueError("bf16 has no 8-bit code: convert with torch's x.to(torch.bfloat16)")
    if fmt.family in (Family.GRID, Family.PYTHON) or fmt.element.bits > _MOST_CODE_BITS:
        raise ValueError(
            f"{fmt.name} has no codes here: take quantise, whose values lie on its grid"
        )


#: Maps a chunk of x and its random numbers to magnitudes on the grid, x in float32, and codes of the scales.
EncodeChunk = Callable[[Tensor, Tensor | None, Scratch], tuple[Tensor, Tensor, Tensor]]


def _encode_mx(
    x: Tensor, axis: int, spec: QuantSpec, random: Tensor | None
) -> tuple[Tensor, Tensor]:
    def encode_chunk(
        x_OBKI: Tensor, random_OBKI: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, signed, field = mx_magnitudes(x_OBKI, spec, random_OBKI, scratch)
        return q, signed, field >> MANTISSA_BITS

    return _encode_blocks(x, axis, spec, random, encode_chunk, nan_code=0xFF)


def _encode_nv(
    x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None, random: Tensor | None
) -> tuple[Tensor, TwoLevelScales]:
    element = spec.fmt.block_scale
    assert element is not None
    (nan_code,) = element.nan_codes

    def encode_chunk(
        x_OBKI: Tensor, random_OBKI: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, signed, block_scale = nv_magnitudes(x_OBKI, spec, scale, random_OBKI, scratch)
        is_nan = block_scale.isnan()
        code = magnitude_code(block_scale, element).masked_fill_(is_nan, nan_code)
        return q, signed, code

    codes, scales = _encode_blocks(x, axis, spec, random, encode_chunk, nan_code)
    return codes, TwoLevelScales(scales, or_one(scale, x))


def _encode_blocks(
    x: Tensor,
    axis: int,
    spec: QuantSpec,
    random: Tensor | None,
    encode_chunk: EncodeChunk,
    nan_code: int,
) -> tuple[Tensor, Tensor]:
    """Codes and block scales; the codes of a block whose scale is `nan_code` are 0."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = codes.new_empty(blocked_shape(x.shape, axis, spec.block))
    extents = outer_axis_inner(x.shape, axis)
    x_ONI, codes_ONI = x.view(extents), codes.view(extents)
    scales_OBI = scales.view(outer_axis_inner(scales.shape, axis))
    limit = chunk_limit(x.device)
    scratch = Scratch(scratch_size(x_ONI, spec.block, limit), x.device)
    for chunk in chunks(extents, spec.block, limit):
        part = None if random is None else chunk.elements(random.view(extents))
        q, signed, scale_code = encode_chunk(chunk.elements(x_ONI), part, scratch)
        code = magnitude_code(q, spec.fmt.element)
        code.add_(as_bits(signed).lt(0), alpha=spec.fmt.element.sign_bit)
        chunk.elements(codes_ONI).copy_(code.masked_fill_(scale_code == nan_code, 0))
        chunk.scales(scales_OBI).copy_(scale_code)
    return codes, scales


def magnitude_code(q: Tensor, element: Element) -> Tensor:
    """The codes, int32, of magnitudes q (float32, overwritten) on the element's grid.

    q is scaled so that the element's smallest normal becomes float32's; its bits are then the code followed by zeros.
    """
    q.mul_(2.0 ** (_FLOAT32_EMIN - element.emin))
    return as_bits(q) >> (MANTISSA_BITS - element.mantissa_bits)


def _encode_flat(
    x: Tensor, spec: QuantSpec, scale: Tensor | None, random: Tensor | None
) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    x_N, codes_N = x.view(-1), codes.view(-1)
    scaled_values = SCALED_VALUES[spec.fmt.family]
    limit = chunk_limit(x.device)
    scratch = Scratch(min(x.numel(), limit), x.device)
    for start in range(0, x.numel(), limit):
        chunk = slice(start, start + limit)
        part = None if random is None else random.view(-1)[chunk]
        q = scaled_values(x_N[chunk], spec, scale, part, scratch)
        if spec.fmt.family is Family.HIF8:
            torch.index_select(hif8_code_table(x.device), 0, value_key(q), out=codes_N[chunk])
        else:
            codes_N[chunk] = _signed_code(q, spec.fmt.element)
    return codes, or_one(scale, x)


def _signed_code(q: Tensor, element: Element) -> Tensor:
    """The codes, int32, of values q (float32, overwritten); NaN becomes the last NaN code, without a sign."""
    is_negative, is_nan, is_inf = as_bits(q) < 0, q.isnan(), q.isinf()
    as_bits(q).bitwise_and_(MAGNITUDE_MASK)
    code = magnitude_code(q, element)
    for inf_code in element.inf_codes:
        code.masked_fill_(is_inf, inf_code)
    code.add_(is_negative, alpha=element.sign_bit)
    return code.masked_fill_(is_nan, element.nan_codes[-1])


def or_one(scale: Tensor | None, x: Tensor) -> Tensor:
    """The scale of a tensor x in the form of `encode`: 0-dim float32, 1 without scaling."""
    return torch.ones((), dtype=torch.float32, device=x.device) if scale is None else scale
