"""Whether a tensor is the quantised form of a source in a format of the family `grid`.

The scales follow from the source, so each element is compared with the two values of the grid beside its source at the
scale of its block: it must be one of them, rounded to the tensor's dtype. Under rounding to nearest that leaves one
value, and at a tie two. No tolerance is needed, because the scales are known.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.codes import code_values
from quantexp.formats.declared.arithmetic import block_factors, grid_chunks
from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import from_tiles, outer_axis_inner, to_tiles
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Element, Rounding


def stems_from(
    x: Tensor, source: Tensor, spec: QuantSpec, *, axis: int, amax: Tensor | None = None
) -> Tensor:
    """Whether each element of x is a possible result of quantising the source, bool of x's shape.

    Args:
        x: the quantised tensor, in the dtype of the product.
        source: the tensor before quantisation, of x's shape.
        spec: a specification of the family `grid`, without a transform.
        axis: the axis that blocks run along.
        amax: as in `quantise`.
    """
    return _stems_from(x.detach(), source.detach(), spec, axis % x.ndim, amax)


@exact_in_pool
def _stems_from(
    x: Tensor, source: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None
) -> Tensor:
    return _compared(x, source, spec, axis, tensor_scale(source, spec, amax))


def _compared(
    x: Tensor, source: Tensor, spec: QuantSpec, axis: int, scale: Tensor | None
) -> Tensor:
    if spec.fmt.across > 1:
        # Tiles are float32; a value of a 16-bit dtype keeps its bits there, and its dtype is that of the comparison.
        pair = [to_tiles(part, spec.fmt, axis) for part in (x, source)]
        of_tile = replace(spec, fmt=replace(spec.fmt, across=1), block=pair[0].shape[-1])
        one = (1, pair[0].numel(), 1)
        fits = _in_blocks(pair[0].view(one), pair[1].view(one), of_tile, scale, x.dtype)
        return from_tiles(fits.view(pair[0].shape), tuple(x.shape), spec.fmt, axis)
    extents = outer_axis_inner(tuple(x.shape), axis)
    fits = _in_blocks(x.reshape(extents), source.reshape(extents), spec, scale, x.dtype)
    return fits.view(x.shape)


def _in_blocks(
    x_ONI: Tensor, source_ONI: Tensor, spec: QuantSpec, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    fits = torch.empty(x_ONI.shape, dtype=torch.bool, device=x_ONI.device)
    values = sorted_values(spec.fmt.element, x_ONI.device)
    for chunk in grid_chunks(x_ONI, spec):
        source = chunk.elements(source_ONI).to(torch.float32)
        d = block_factors(source, spec, scale)
        v = (source / d).double().contiguous()
        high = torch.searchsorted(values, v).clamp_(1, values.numel() - 1)
        low_value, high_value = values[high - 1], values[high]
        got = chunk.elements(x_ONI).to(dtype).float()
        at_low, at_high = (
            got == (value.float() * d).to(dtype).float() for value in (low_value, high_value)
        )
        if spec.rounding is not Rounding.STOCHASTIC:
            at_low &= 2 * v <= low_value + high_value
            at_high &= 2 * v >= low_value + high_value
        chunk.elements(fits).copy_(at_low | at_high | (got.isnan() & (d * v).isnan()))
    return fits


@lru_cache(maxsize=32)
def sorted_values(element: Element, device: torch.device) -> Tensor:
    """The finite values of an element, ascending, float64."""
    values = torch.tensor(code_values(element), dtype=torch.float64, device=device)
    finite: Tensor = torch.unique(values[values.isfinite()])
    return finite
