"""Blocks of several rows: a matrix as a list of blocks, and back.

    # R rows (all axes but the blocked one, flattened in order), N the blocked axis, m rows and n elements of a block

The last blocks of either axis may be short; they are filled with zeros, which change no scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.types import Format


def to_tiles(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """x in float32 as [blocks, m n], contiguous; blocks in the order of rows, then along the axis."""
    x_RN = _rows(x, axis).to(torch.float32)
    m, n = _extents(x_RN.shape[1], fmt)
    rows, columns = _counts((x_RN.shape[0], x_RN.shape[1]), m, n)
    padded = x_RN.new_zeros(rows * m, columns * n)
    padded[: x_RN.shape[0], : x_RN.shape[1]] = x_RN
    return padded.view(rows, m, columns, n).transpose(1, 2).reshape(rows * columns, m * n)


def from_tiles(tiles: Tensor, shape: tuple[int, ...], fmt: Format, axis: int) -> Tensor:
    """The inverse of `to_tiles`, of this shape."""
    if not shape or 0 in shape:
        return tiles[:1, :1].reshape(shape) if not shape else tiles.new_empty(shape)
    order = [dim for dim in range(len(shape)) if dim != axis % len(shape)]
    outer, extent = [shape[dim] for dim in order], shape[axis]
    num_rows = math.prod(outer)
    m, n = _extents(extent, fmt)
    rows, columns = _counts((num_rows, extent), m, n)
    padded = tiles.view(rows, columns, m, n).transpose(1, 2).reshape(rows * m, columns * n)
    return padded[:num_rows, :extent].reshape(*outer, extent).movedim(-1, axis)


def num_tiles(shape: tuple[int, ...], fmt: Format, axis: int) -> tuple[int, int]:
    """The number of blocks across and along the axis; a 0-dim tensor has one, an empty one none."""
    if 0 in shape:
        return 0, 1
    shape, axis = (shape, axis) if shape else ((1,), 0)
    extent = shape[axis]
    num_rows = math.prod(shape) // extent if extent else 0
    return _counts((num_rows, extent), *_extents(extent, fmt))


def _rows(x: Tensor, axis: int) -> Tensor:
    if not x.ndim or not x.numel():
        return x.reshape(-1, 1)
    return x.movedim(axis, -1).reshape(-1, x.shape[axis])


def _extents(extent: int, fmt: Format) -> tuple[int, int]:
    assert fmt.block is not None
    return fmt.across, min(fmt.block, max(extent, 1))


def _counts(shape: tuple[int, int], m: int, n: int) -> tuple[int, int]:
    return -(-shape[0] // m), -(-shape[1] // n)
