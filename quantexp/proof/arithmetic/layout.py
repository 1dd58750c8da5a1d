"""Views of a tensor as blocks, in chunks.

O all axes before the blocked one, N that axis, I all axes after it; B blocks of K elements; R rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from types import EllipsisType

import torch
from torch import Tensor

from quantexp.formats.spec import QuantSpec

#: Elements of a chunk: its temporaries fit in a core's L2 cache, or in a GPU's memory.
_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 24


def chunk_limit(x: Tensor) -> int:
    """The largest number of elements of a chunk."""
    return _CHUNK * torch.get_num_threads() if x.device.type == "cpu" else _DEVICE_CHUNK


def extents(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """The number of elements before, along and after an axis; a 0-dim tensor has one along it."""
    if not shape:
        return 1, 1, 1
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def blocks(x: Tensor, spec: QuantSpec, axis: int) -> list[Tensor]:
    """Views of contiguous x as [O, B, K, I]: its whole blocks, and its short ones; K is 1 without blocks."""
    if spec.fmt.block is None or not x.ndim:
        return [x.view(1, -1, 1, 1)]
    outer, extent, inner = extents(x.shape, axis)
    block = min(spec.block, extent)
    if x.numel() and extent % block == 0:
        return [x.view(outer, -1, block, inner)]
    x_ONI = x.view(outer, extent, inner)
    whole = extent // block * block
    parts = [torch.unflatten(x_ONI[:, :whole], 1, (-1, block)), x_ONI[:, whole:].unsqueeze(1)]
    return [part for part in parts if part.numel()]


def chunks(x_OBKI: Tensor) -> Iterator[tuple[slice | EllipsisType, ...]]:
    """Indices of parts with whole blocks."""
    limit, (o, b, k, i) = chunk_limit(x_OBKI), x_OBKI.shape
    if x_OBKI.numel() <= limit:
        yield (...,)
        return
    step_i = min(i, max(1, limit // k))
    step_b = min(b, max(1, limit // (k * step_i)))
    step_o = max(1, limit // (k * step_i * step_b))
    starts = product(range(0, o, step_o), range(0, b, step_b), range(0, i, step_i))
    for first_o, first_b, first_i in starts:
        yield (
            slice(first_o, first_o + step_o),
            slice(first_b, first_b + step_b),
            slice(None),
            slice(first_i, first_i + step_i),
        )


class Tiles:
    """The blocks of several rows of tensors of one shape: rows are all axes but the blocked one, flattened in order."""

    def __init__(self, shape: Sequence[int], spec: QuantSpec, axis: int) -> None:
        self._shape, self._axis = tuple(shape), axis
        before, extent, after = extents(shape, axis)
        self._rows, self._extent = before * after, extent
        self._across, self._along = spec.fmt.across, min(spec.block, extent)
        self._counts = -(-self._rows // self._across), -(-extent // self._along)

    def of(self, x: Tensor) -> Tensor:
        """x as [1, B, K, 1]; zeros fill short blocks."""
        x_RN = x.movedim(self._axis, -1) if x.ndim else x
        (b, c), m, n = self._counts, self._across, self._along
        padded = x.new_zeros(b * m, c * n)
        padded[: self._rows, : self._extent] = x_RN.reshape(self._rows, self._extent)
        return padded.view(b, m, c, n).transpose(1, 2).reshape(1, b * c, m * n, 1)

    def joined(self, x_OBKI: Tensor) -> Tensor:
        """The inverse."""
        (b, c), m, n = self._counts, self._across, self._along
        padded = x_OBKI.view(b, c, m, n).transpose(1, 2).reshape(b * m, c * n)
        x_RN = padded[: self._rows, : self._extent]
        if not self._shape:
            return x_RN.reshape(())
        outer = [size for dim, size in enumerate(self._shape) if dim != self._axis]
        return x_RN.reshape(*outer, self._extent).movedim(-1, self._axis).contiguous()


def memory_order(x: Tensor) -> list[int]:
    """The axes of x in the order of its memory, the slowest first."""
    return sorted(range(x.ndim), key=lambda dim: (-x.stride()[dim], dim))
