"""Tests whether a tensor lies on a format's grid, with unknown scales.

The scales are recomputed from the tensor. MX: quantisation is idempotent, and a tensor rounded stochastically or
pre-scaled also lies on the grid of the scale that its own amax gives. A tensor is therefore on the grid if
quantising it once more changes nothing. For formats with a scale per tensor, see `scale_search`.

A tensor can lie on a grid by chance: about 1 in 16 bf16 values lies on an 8-bit grid, 1 in 80 on that of E2M1. Grids of
neighbouring scales share most of their values, so single elements that miss reveal blocks along another axis, not the
share that fits. Shards need the amax of the whole tensor.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.operators import operator, spec_of, text_of, with_blocks_of_examples
from quantexp.formats.quantising import quantise
from quantexp.formats.scale_search import fit_blocks, fit_flat, same
from quantexp.formats.spec import AnySpec, QuantSpec, check_amax, resolve
from quantexp.formats.torch_internals import checked_axis, constant, is_plain
from quantexp.formats.types import Family


def lies_on_grid(x: Tensor, fmt: AnySpec, *, axis: int = -1, amax: Tensor | None = None) -> Tensor:
    """Whether each element is a possible result of quantisation, bool of x's shape.

    Zeros of either sign are on every grid. NaN is on the grid of FP8, HiF8 and bf16, and on that of MX and NVFP4 if its
    whole block is NaN. Inf is on the grid of E5M2, HiF8 and bf16, and never on that of MX and NVFP4, where it stems
    from a product beyond the dtype's range. No other element of a block with NaN or Inf is on the grid.

    Raises:
        TypeError: as for `quantise`.
        ValueError: as for `quantise`.
    """
    axis = checked_axis(x, axis, amax)
    if is_plain(x, amax):
        return _lies_on_grid(constant(x), _of_grid(resolve(fmt), amax), axis, amax)
    on_grid: Tensor = _operator(x.detach(), text_of(fmt, has_amax=amax is not None), axis, amax)
    return on_grid


@exact_in_pool
def _lies_on_grid(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor:
    match spec.fmt.family:
        case Family.GRID | Family.PYTHON:
            raise _needs_source(spec)
        case Family.HIF8 | Family.FP8:
            return fit_flat(x, spec, amax)
        case Family.NV:
            return fit_blocks(x, axis, spec, amax)
        case Family.MX | Family.BF16:
            return same(x, quantise(x, spec, axis=axis))


def _needs_source(spec: QuantSpec) -> ValueError:
    return ValueError(
        f"the scales of {spec.fmt.name} do not follow from quantised values: compare them with what quantise makes of "
        "the tensor before quantisation"
    )


def _of_operator(x: Tensor, spec: str, axis: int, amax: Tensor | None) -> Tensor:
    return _lies_on_grid(x, _of_grid(spec_of(spec), amax), axis, amax).contiguous()


def _shape_of_operator(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


_operator = operator(
    "lies_on_grid",
    "(Tensor x, str spec, int axis, Tensor? amax) -> Tensor",
    _of_operator,
    _shape_of_operator,
    with_blocks_of_examples,
)


def _of_grid(spec: QuantSpec, amax: Tensor | None) -> QuantSpec:
    """The specification by which a tensor on the grid stays as it is: rounded to nearest, and infinity kept."""
    check_amax(spec, amax is not None)
    saturate = "saturate" not in spec.fmt.options
    if (spec.rounding, spec.pre_scale, spec.saturate) == (spec.fmt.rounding, 1.0, saturate):
        return spec
    return replace(spec, rounding=spec.fmt.rounding, pre_scale=1.0, saturate=saturate)
