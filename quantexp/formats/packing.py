"""Two four-bit codes per byte, the memory layout of FP4: the first in the lower half.

Neighbours along one axis share a byte; for an odd number the last byte's upper half is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.table import FORMATS
from quantexp.formats.types import Format

_HALF_BITS = 4


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
