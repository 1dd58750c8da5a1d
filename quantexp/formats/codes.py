"""The value of every code of an element, from the rules of its specification, and two four-bit codes per byte.

Packed codes are the memory layout of FP4: neighbours along one axis share a byte, the first in the lower half; for an
odd number the last byte's upper half is 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.rounding import as_bits
from quantexp.formats.table import FORMATS, HIF8
from quantexp.formats.types import Element, Format

HIF8_NAN_CODE = 0x80
_HALF_BITS = 4
#: float32 bits below the sign, the exponent and the three mantissa bits that distinguish all values.
KEY_SHIFT = 20


def code_values(element: Element) -> list[float]:
    """The value of each code from 0 to 2^bits - 1; for HiF8, the code 0x80 is NaN. Those of a list, in its order.

    The code of the negative zero is that of the lowest value, if the element has one below -max.
    """
    if element.values:
        return list(element.values)
    value_of = _hif8_magnitude if element is HIF8 else _magnitude
    magnitudes = [value_of(element, code) for code in range(element.sign_bit)]
    values = magnitudes + [-value for value in magnitudes]
    if element is HIF8:
        values[HIF8_NAN_CODE] = math.nan
    elif element.lowest is not None:
        values[element.sign_bit] = element.lowest
    return values


def values_of(fmt: Format) -> list[float]:
    """The finite values that an element may have in units of its block's scale, ascending: those of all its elements,
    with all micro-exponents.
    """
    scale = fmt.grid_scale
    elements = (fmt.element, *(() if scale is None else scale.others))
    levels = 0 if scale is None else len(scale.micro_exponents)
    values = {
        value * 2.0**level
        for element in elements
        for value in code_values(element)
        for level in range(levels + 1)
    }
    return sorted(value for value in values if math.isfinite(value))


def _magnitude(element: Element, code: int) -> float:
    """Magnitude of a code with a fixed exponent field (OCP MX v1.0 section 5.3)."""
    if code in element.nan_codes:
        return math.nan
    if code in element.inf_codes:
        return math.inf
    exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
    if exponent > 0:
        mantissa += 1 << element.mantissa_bits
        exponent -= 1
    return math.ldexp(mantissa, element.emin + exponent - element.mantissa_bits)


def _hif8_magnitude(element: Element, code: int) -> float:
    """Magnitude of a HiF8 code: dot code, exponent, mantissa (arXiv 2409.16626 section 3).

    The dot codes 11, 10, 01, 001 and 0001 select 4, 3, 2, 1 and 0 exponent bits; 0000 selects the powers of two below.
    An exponent is stored as its sign and its magnitude without the leading 1.
    """
    if code in element.inf_codes:
        return math.inf
    if code < 0x08:
        return math.ldexp(1, code - 23) if code else 0.0
    dot_bits, exponent_bits = next(
        (dot_bits, exponent_bits)
        for dot, dot_bits, exponent_bits in _DOT_CODES
        if code >> (7 - dot_bits) == dot
    )
    mantissa_bits = 7 - dot_bits - exponent_bits
    field, mantissa = divmod(code, 1 << mantissa_bits)
    exponent = _sign_magnitude(field % (1 << exponent_bits), exponent_bits)
    return math.ldexp(mantissa + (1 << mantissa_bits), exponent - mantissa_bits)


#: Dot code, its bits, exponent bits.
_DOT_CODES = ((0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0))


def _sign_magnitude(field: int, bits: int) -> int:
    if bits == 0:
        return 0
    sign, rest = divmod(field, 1 << (bits - 1))
    magnitude = rest + (1 << (bits - 1))
    return -magnitude if sign else magnitude


@lru_cache(maxsize=32)
def value_table(element: Element, device: torch.device) -> Tensor:
    """`code_values` as a float32 tensor."""
    return torch.tensor(code_values(element), dtype=torch.float32, device=device)


@lru_cache(maxsize=4)
def hif8_code_table(device: torch.device) -> Tensor:
    """The HiF8 code (uint8), indexed by the upper twelve bits of its value in float32; 0x80 for all others."""
    values = value_table(HIF8, device)
    has_value = ~values.isnan()
    codes = torch.arange(values.numel(), dtype=torch.uint8, device=device)
    table = codes.new_full((1 << (32 - KEY_SHIFT),), HIF8_NAN_CODE)
    table[value_key(values)[has_value].long()] = codes[has_value]
    return table


def value_key(values: Tensor) -> Tensor:
    """The upper twelve bits of float32 values, int32."""
    return (as_bits(values) >> KEY_SHIFT) & ((1 << (32 - KEY_SHIFT)) - 1)


def check_packable(fmt: Format) -> None:
    """Refuse a format whose codes do not have four bits.

    Raises:
        ValueError: names the formats that can be packed.
    """
    if fmt.element.bits != _HALF_BITS:
        names = ", ".join(f.name for f in FORMATS.values() if f.element.bits == _HALF_BITS)
        raise ValueError(
            f"{fmt.name} has codes of {fmt.element.bits} bits, packed takes 4: leave it out, or choose one of {names}"
        )


def packed_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of `pack`'s result."""
    return (*shape[:axis], -(-shape[axis] // 2), *shape[axis + 1 :]) if shape else ()


def unpacked_shape(shape: tuple[int, ...], axis: int, extent: int | None) -> tuple[int, ...]:
    """The shape of `unpack`'s result.

    Raises:
        ValueError: the extent does not match the number of bytes.
    """
    if not shape:
        return ()
    num_bytes = shape[axis]
    extent = 2 * num_bytes if extent is None else extent
    if -(-extent // 2) != num_bytes or extent < 0:
        raise ValueError(
            f"extent must be {2 * num_bytes} or one less for {num_bytes} bytes of two codes, got {extent}"
        )
    return (*shape[:axis], extent, *shape[axis + 1 :])


def pack(codes: Tensor, axis: int) -> Tensor:
    """Bytes of two codes each (uint8), ceil(n / 2) of them for an extent n of `axis`; a scalar is unchanged."""
    if codes.ndim == 0:
        return codes
    first, second = (codes.movedim(axis, -1)[..., start::2] for start in (0, 1))
    packed = first.contiguous()
    packed[..., : second.shape[-1]] |= second << _HALF_BITS
    return packed.movedim(-1, axis).contiguous()


def unpack(packed: Tensor, axis: int, extent: int | None) -> Tensor:
    """One code per byte, `extent` of them along `axis`; None means two per byte.

    Raises:
        ValueError: the extent does not match the number of bytes.
    """
    if packed.ndim == 0:
        return packed & 0xF
    extent = unpacked_shape(tuple(packed.shape), axis, extent)[axis]
    bytes_ = packed.movedim(axis, -1)
    codes = torch.stack([bytes_ & 0xF, bytes_ >> _HALF_BITS], dim=-1).flatten(-2)
    return codes[..., :extent].movedim(-1, axis).contiguous()
