"""Reads the bytes and scales of a tensor that Transformer Engine has quantised; needs torch alone.

A tensor [M, K] has up to two copies: one whose blocks run along K (rowwise), and one along M (columnwise). Their
layouts (pytorch/tensor/ of Transformer Engine 2.11 and 2.13; scales are padded to multiples of 4 and 128):

    class       copy         codes                         scales
    MXFP8       rowwise      [M, K]                        E8M0 [M, K/32]
                columnwise   [M, K]                        E8M0 [M/32, K]
    Float8      both         [M, K], or transposed [K, M]  float32, the reciprocal of the factor
    Blockwise   rowwise      [M, K]                        float32 [K/128, M], or [M/128, K/128]
                columnwise   [K, M]                        float32 [M/128, K], or [K/128, M/128]
    NVFP4       rowwise      two a byte [M, K/2]           E4M3 [M, K/16], under amax / 2688
                columnwise   two a byte [K, M/2]           E4M3 [K, M/16], under amax / 2688

From version 2.12 on, scales of MXFP8 and NVFP4 may lie as cuBLAS takes them: tiles of 128 x 4, each as 32 x 4 x 4.
`read` undoes all of this, so that codes are [M, K], and scales [M, blocks] or [blocks, K].
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Kind(Enum):
    """A class of stored tensors, by the name that messages have."""

    MXFP8 = "MXFP8"
    FP8 = "FP8 under one scale"
    BLOCK = "FP8 in blocks of 128"
    NVFP4 = "NVFP4"


_KINDS = {
    "MXFP8TensorStorage": Kind.MXFP8,
    "Float8TensorStorage": Kind.FP8,
    "Float8BlockwiseQTensorStorage": Kind.BLOCK,
    "NVFP4TensorStorage": Kind.NVFP4,
}
#: Elements that share a scale, along the axis of the blocks.
BLOCKS = {Kind.MXFP8: 32, Kind.BLOCK: 128, Kind.NVFP4: 16}
_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: NVFP4: the largest E2M1 times the largest E4M3.
NV_TOP = 6.0 * 448.0
#: The magnitudes of E2M1 by code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Stored:
    """One copy of a tensor [M, K]."""

    kind: Kind
    #: `e4m3`, `e5m2` or `e2m1`.
    element: str
    #: uint8 [M, K], one code an element.
    codes: Tensor
    #: uint8 (E8M0, E4M3) or float32; of blocks [M, blocks] or [blocks, K], or [row blocks, blocks]; of FP8 one element.
    scales: Tensor
    #: The dimension that blocks run along, -1 or 0.
    axis: int
    #: Rows of a block: 1, or those of a block of two dimensions.
    across: int = 1
    #: NVFP4: float32, the factor of all block scales.
    tensor_scale: Tensor | None = None

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.element})"

    def values(self) -> Tensor:
        """What the codes stand for, float32 [M, K]."""
        if self.kind is Kind.NVFP4:
            magnitudes = E2M1.to(self.codes.device)
            values = torch.cat([magnitudes, -magnitudes])[self.codes.long()]
        else:
            values = self.codes.view(_TORCH[self.element]).float()
        return values * self._scale_of_each()

    def _scale_of_each(self) -> Tensor:
        if self.kind is Kind.FP8:
            return self.scales.float()
        scales = self.scales
        if self.kind is Kind.MXFP8:
            scales = e8m0_values(scales)
        if self.kind is Kind.NVFP4:
            assert self.tensor_scale is not None
            scales = scales.view(torch.float8_e4m3fn).float() * self.tensor_scale
        M, K = self.codes.shape
        scales = scales.repeat_interleave(BLOCKS[self.kind], self.axis)
        if self.across > 1:
            scales = scales.repeat_interleave(self.across, -1 - self.axis)
        return scales[:M, :K]


def e8m0_values(scales: Tensor) -> Tensor:
    """2^(s - 127), float32; NaN for the byte 255."""
    values = torch.ldexp(torch.ones((), device=scales.device), scales.int() - 127)
    return values.masked_fill(scales == 255, torch.nan)


def kind_of(x: object) -> Kind | None:
    """The class of a stored tensor; None for a plain tensor."""
    names = [each.__name__ for each in type(x).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def read(x: Any, axis: int) -> Stored | None:
    """The copy of a stored tensor whose blocks run along a dimension of [M, K], -1 or 0; None for a plain tensor.

    Raises:
        ValueError: the tensor does not have that copy.
    """
    match kind_of(x):
        case Kind.MXFP8:
            return _mxfp8(x, axis)
        case Kind.FP8:
            return _fp8(x, axis)
        case Kind.BLOCK:
            return _block(x, axis)
        case Kind.NVFP4:
            return _nvfp4(x, axis)
    return None


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] of any shape in cuBLAS's order, both extents padded to multiples of 128 and 4, in rows."""
    tiles = scales.reshape(_padded(rows, 128) // 128, _padded(columns, 4) // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(_padded(rows, 128), _padded(columns, 4))


def _mxfp8(x: Any, axis: int) -> Stored:
    codes = _present(x, axis, "data").flatten(0, -2)
    M, K = codes.shape
    scales = _present(x, axis, "scale_inv")
    blocks = (K if axis == -1 else M) // 32
    if getattr(x, "_with_gemm_swizzled_scales", False):
        of_lines = unswizzled(scales, M if axis == -1 else K, blocks)
        scales = of_lines if axis == -1 else of_lines.t()
    scales = scales[:M, :blocks] if axis == -1 else scales[:blocks, :K]
    return Stored(Kind.MXFP8, _element(x._fp8_dtype), codes, scales, axis)


def _fp8(x: Any, axis: int) -> Stored:
    element, scale = _element(x._fp8_dtype), x._scale_inv
    transpose = None if x._transpose_invalid else x._transpose
    if transpose is not None and (axis == 0 or x._data is None):
        return Stored(Kind.FP8, element, transpose.flatten(1).t(), scale, axis)
    if x._data is None:
        raise ValueError("it has no data")
    return Stored(Kind.FP8, element, x._data.flatten(0, -2), scale, axis)


def _block(x: Any, axis: int) -> Stored:
    codes, scales = _present(x, axis, "data"), _present(x, axis, "scale_inv")
    codes = codes.flatten(0, -2) if axis == -1 else codes.flatten(1).t()
    M, K = codes.shape
    if x._is_2D_scaled:
        scales = scales if axis == -1 else scales.t()
        scales = scales[: -(-M // 128), : -(-K // 128)]
        return Stored(Kind.BLOCK, _element(x._fp8_dtype), codes, scales, axis, across=128)
    scales = scales[:, :M].t() if axis == -1 else scales[:, :K]
    return Stored(Kind.BLOCK, _element(x._fp8_dtype), codes, scales, axis)


def _nvfp4(x: Any, axis: int) -> Stored:
    pairs, scales = _present(x, axis, "data"), _present(x, axis, "scale_inv")
    pairs = pairs.flatten(0, -2)
    lines = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    rows, blocks = lines.shape[0], lines.shape[1] // 16
    if getattr(x, "_with_gemm_swizzled_scales", False):
        scales = unswizzled(scales, rows, blocks)
    scales = scales[:rows, :blocks].view(torch.uint8)
    amax = x._amax_rowwise if axis == -1 else x._amax_columnwise
    if axis == 0:
        lines, scales = lines.t(), scales.t()
    return Stored(Kind.NVFP4, "e2m1", lines, scales, axis, tensor_scale=amax.float() / NV_TOP)


def _present(x: Any, axis: int, name: str) -> Tensor:
    direction = "rowwise" if axis == -1 else "columnwise"
    tensor: Tensor | None = getattr(x, f"_{direction}_{name}")
    if tensor is None:
        raise ValueError(f"it has no {direction} copy")
    return tensor


def _element(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}[name]


def _padded(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple
