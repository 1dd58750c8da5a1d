"""The magnitudes that a declared format represents at the scales of a tensor's blocks.

A format under block scales has another grid in each block; what is shown is the grid of the largest block and that of
the median block, of the blocks that a bounded sample holds. A format with one scale for the tensor, or none, has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import DeclaredOperand, declared_operands, laid_out
from quantexp.analysis.tensors.sample import sample_blocks
from quantexp.errors import CaptureError
from quantexp.formats import Family, TwoLevelScales, scales_of
from quantexp.formats.codes import values_of
from quantexp.formats.decoding import scale_values

#: The number of elements among which the median block is determined.
_SAMPLE_ELEMENTS = 1 << 17
_MOST_ROWS = 4
#: The scale of a zero MX block, which has no magnitudes.
_OF_ZEROS = 2.0**-127


@dataclass(frozen=True)
class Grid:
    """One row of representable magnitudes, or the reason for its absence."""

    #: `mxfp8_e4m3, largest block`; all labels of rows with the same magnitudes.
    label: str
    #: The format, which determines the colour.
    format: str
    #: Ascending, without zero; empty if the grid cannot be drawn.
    magnitudes: tuple[float, ...]


def grids_of(metadata: Mapping[str, Any], x: Tensor, abs_max: float | None) -> list[Grid]:
    """The rows for a tensor, at most four; empty if no product quantises it, or if it has no finite magnitude.

    Raises:
        CaptureError: a format or an axis of the manifest that is not known.
    """
    if not abs_max:
        return []
    rows: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for declared in declared_operands(metadata):
        for grid in _grids(declared, x, abs_max):
            rows.setdefault((grid.format, grid.magnitudes), []).append(grid.label)
    grids = [
        Grid(", ".join(dict.fromkeys(labels)), fmt, magnitudes)
        for (fmt, magnitudes), labels in rows.items()
    ]
    return grids[:_MOST_ROWS]


def _grids(declared: DeclaredOperand, x: Tensor, abs_max: float) -> list[Grid]:
    spec, fmt = declared.spec, declared.format
    if spec.is_transformed:
        return [Grid(f"{declared.slot}: {fmt.name}, of its Hadamard transform", fmt.name, ())]
    amax = None
    if spec.is_scaled:
        amax = torch.tensor(abs_max if declared.amax is None else declared.amax)
    if fmt.family in (Family.HIF8, Family.FP8):
        scale = scales_of(x.new_tensor([abs_max]), spec, amax=amax)
        assert isinstance(scale, Tensor)
        return [Grid(fmt.name, fmt.name, _magnitudes(declared, 1 / float(scale)))]
    if declared.dim >= x.ndim or -declared.dim > x.ndim:
        raise CaptureError(f"{declared.slot}: the tensor has no axis {declared.dim}")
    largest = _scales(declared, x.new_tensor([abs_max]), 0, amax)
    if declared.rows is not None and declared.dim == 0:
        x = laid_out(x, declared.rows).x
    part, dim = sample_blocks(x, declared.dim, spec.block, _SAMPLE_ELEMENTS)
    scales = _scales(declared, part, dim, amax)
    known = scales[scales.isfinite() & (scales > _OF_ZEROS)]
    rows = [
        Grid(f"{fmt.name} in the largest block", fmt.name, _magnitudes(declared, float(largest)))
    ]
    if known.numel():
        middle = float(known.median())
        label = f"median block of {declared.slot}"
        rows.append(Grid(label, fmt.name, _magnitudes(declared, middle)))
    return rows


def _scales(declared: DeclaredOperand, x: Tensor, dim: int, amax: Tensor | None) -> Tensor:
    scales = scales_of(x, declared.spec, axis=dim, amax=amax)
    if isinstance(scales, TwoLevelScales):
        return scale_values(scales.block, scales.tensor, declared.format).reshape(-1)
    return scale_values(scales, None, declared.format).reshape(-1)


def _magnitudes(declared: DeclaredOperand, scale: float) -> tuple[float, ...]:
    of_x = scale / declared.spec.pre_scale
    return tuple(sorted({v * of_x for v in values_of(declared.format) if v > 0}))
