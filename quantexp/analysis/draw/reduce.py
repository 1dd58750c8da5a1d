"""Reduces a tensor to a matrix of cells, each with the largest magnitude of a rectangle of elements.

Magnitudes of bfloat16, float16 and float32 are compared as the integers that their bits are without the sign: the order
is the same, NaN comes above infinity, and nothing is widened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

#: dtype -> (integer of the same width, its bits without the sign).
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}
#: Elements of a chunk.
_CHUNK = 1 << 20

#: The names of a captured tensor's dimensions, by layer type, name and number of dimensions.
_LINEAR = ("token", "sequence", "channel")
_HEADS = ("token", "sequence", "head", "channel")
_SCORES = ("sequence", "head", "query", "key")
_WEIGHT = ("output channel", "input channel")


@dataclass(frozen=True)
class Cells:
    """The cells, row by row, with their meaning."""

    #: float32; NaN in a cell that contains NaN, inf in a cell that contains Inf.
    amax_RC: Array
    #: The numbers of elements in total, and of one cell at most.
    num_rows: int
    num_columns: int
    rows_each: int
    columns_each: int
    #: `token, sequence`.
    row_label: str
    column_label: str


def cells_of(x: Tensor, metadata: Mapping[str, Any], most_rows: int, most_columns: int) -> Cells:
    """The cells of a non-empty bfloat16, float16 or float32 tensor, within the given maximum."""
    names = axis_names(metadata, x.ndim)
    split = _split(x.ndim, metadata)
    rows, columns = math.prod(x.shape[:split]), math.prod(x.shape[split:])
    rows_each, columns_each = -(-rows // most_rows), -(-columns // most_columns)
    bits = _cell_bits(x.reshape(rows, columns), rows_each, columns_each)
    amax_RC = bits.view(x.dtype).to(torch.float32).numpy()
    return Cells(
        amax_RC,
        rows,
        columns,
        rows_each,
        columns_each,
        _joined(names[:split], x.shape[:split]),
        _joined(names[split:], x.shape[split:]),
    )


def axis_names(metadata: Mapping[str, Any], ndim: int) -> Sequence[str]:
    """The names of a captured tensor's dimensions; `axis 0` and so on if they are unknown."""
    name, layer_type = str(metadata.get("tensor")), metadata.get("layer_type")
    known: tuple[str, ...]
    if layer_type == "attention":
        known = _SCORES if "attn_weights" in name or "scores" in name else _HEADS
        known = _LINEAR if ndim == 3 else known
    elif name in ("weight", "grad_weight", "main_grad") or name.startswith("weight_"):
        known = _WEIGHT
    else:
        known = _LINEAR
    if len(known) == ndim:
        return known
    if ndim == 2 and known is _LINEAR:
        return ("token", "channel")
    return [f"axis {i}" for i in range(ndim)]


def _split(ndim: int, metadata: Mapping[str, Any]) -> int:
    """The number of leading dimensions that form the rows; heads are placed side by side."""
    if ndim == 4 and metadata.get("layer_type") == "attention":
        name = str(metadata.get("tensor"))
        return 3 if "attn_weights" in name or "scores" in name else 2
    return max(0, ndim - 1)


def _joined(names: Sequence[str], shape: Sequence[int]) -> str:
    """The names of dimensions longer than one, the slowest first."""
    long = [name for name, extent in zip(names, shape, strict=True) if extent > 1]
    return " x ".join(long or list(names[-1:]) or ["element"])


def _cell_bits(x_RC: Tensor, rows_each: int, columns_each: int) -> Tensor:
    """The magnitude bits of each cell, an integer tensor."""
    integer, mask = _BITS[x_RC.dtype]
    step = max(1, _CHUNK // (x_RC.shape[1] * rows_each)) * rows_each
    parts = []
    for start in range(0, x_RC.shape[0], step):
        part = x_RC[start : start + step].contiguous().view(integer) & mask
        parts.append(_maxima(_maxima(part, 0, rows_each), 1, columns_each))
    return torch.cat(parts)


def _maxima(bits: Tensor, dim: int, each: int) -> Tensor:
    """The maximum of each group of `each` neighbours; the last group may be short."""
    if each == 1:
        return bits
    extent = bits.shape[dim]
    missing = -extent % each
    if missing:
        padding = bits.new_zeros((*bits.shape[:dim], missing, *bits.shape[dim + 1 :]))
        bits = torch.cat([bits, padding], dim)
    shape = (*bits.shape[:dim], -1, each, *bits.shape[dim + 1 :])
    return bits.reshape(shape).amax(dim + 1)
