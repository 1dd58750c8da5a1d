"""Tests whether a tensor lies on a format's grid, and measures the grid's spacing, with unknown scales.

The scales are recomputed from the tensor. MX: quantisation is idempotent, and a tensor rounded stochastically or
pre-scaled by 3/4 also lies on the grid of the scale that its own amax gives. A tensor is therefore on the grid if
quantising it once more changes nothing. For formats with a scale per tensor, see `scale_search`.

A tensor can lie on a grid by chance: about 1 in 16 bf16 values lies on an 8-bit grid, 1 in 80 on that of E2M1. Grids of
neighbouring scales share most of their values, so single elements that miss reveal blocks along another axis, not the
share that fits. How much evidence a fit is depends on `local_step` relative to the step of the dtype. Shards need the
amax of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.families import block_amax_bits, scratch_size, tensor_scale
from quantexp.formats.kernels import exact, exact_in_pool
from quantexp.formats.layout import (
    Scratch,
    chunk_limit,
    chunks,
    in_memory_order,
    memory_order,
    outer_axis_inner,
)
from quantexp.formats.operators import operator, spec_of, text_of, with_blocks_of_examples
from quantexp.formats.quantising import quantise, quantise_dense
from quantexp.formats.rounding import inverse_power_of_two, power_of_two, scale_field
from quantexp.formats.scale_search import (
    binade_steps,
    fit_blocks,
    fit_flat,
    flat_steps,
    same,
)
from quantexp.formats.spec import AnySpec, QuantSpec, check_amax, resolve
from quantexp.formats.torch_internals import checked_axis, constant, is_plain
from quantexp.formats.types import Family

#: Elements of a strip.
_STRIP = 1 << 19


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
    on_grid: Tensor = _operator(x.detach(), text_of(fmt, has_amax=amax is not None), axis, amax)[0]
    return on_grid


def num_off_grid(x: Tensor, spec: QuantSpec, *, axis: int = -1, amax: Tensor | None = None) -> int:
    """The number of elements for which `lies_on_grid` is false, of a plain tensor without NaN.

    If there are none, this usually shows at once: quantising once more changes nothing.

    Raises:
        TypeError: as for `quantise`.
        ValueError: as for `quantise`.
    """
    x, axis, spec = constant(x), checked_axis(x, axis, amax), _of_grid(spec, amax)
    if _is_unchanged(x, spec, axis, amax):
        return 0
    return x.numel() - int(_lies_on_grid(x, spec, axis, amax).sum())


@exact
def _is_unchanged(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> bool:
    """Whether quantisation leaves every bit as it is."""
    order = memory_order(x)
    dense = in_memory_order(x, order)
    scale = tensor_scale(x, spec, amax)
    x_ONI = dense.view(outer_axis_inner(dense.shape, order.index(axis) if order else 0))
    strips = _strips(x_ONI, spec.block)
    y = torch.empty_like(strips[0]).view(-1)
    for strip in strips:
        y_ONI = y[: strip.numel()].view(strip.shape)
        quantise_dense(strip, y_ONI, spec, 1, scale, None)
        if not torch.equal(*_words(strip, y_ONI)):
            return False
    return True


def _strips(x_ONI: Tensor, block: int) -> Sequence[Tensor]:
    """Contiguous parts in whole blocks; on a CPU their copies stay in the cache, and take no new memory each."""
    outer, axis, inner = x_ONI.shape
    if x_ONI.device.type != "cpu" or x_ONI.numel() <= _STRIP:
        return [x_ONI]
    if outer > 1:
        return torch.split(x_ONI, max(1, _STRIP // (axis * inner)))
    return torch.split(x_ONI, max(1, _STRIP // (block * inner)) * block, dim=1)


def _words(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous tensors as wide integers, which torch compares several times as fast as bf16; or as they are."""
    sizes = (x.storage_offset(), y.storage_offset(), x.numel())
    if any(size * x.element_size() % 8 for size in sizes):
        return x, y
    return x.view(-1).view(torch.int64), y.view(-1).view(torch.int64)


def local_step(x: Tensor, fmt: AnySpec, *, axis: int = -1, amax: Tensor | None = None) -> Tensor:
    """The spacing of the grid around each element, at its block's scale, float32 of x's shape.

    0 if the element is 0; NaN if it, or anything in its MX or NVFP4 block, is NaN or Inf. The spacing is that of the
    element's binade; a power of two belongs to the binade above it. The derivative is 0.

    Raises:
        TypeError: as for `quantise`.
        ValueError: as for `quantise`.
    """
    axis = checked_axis(x, axis, amax)
    if is_plain(x, amax):
        return _local_step(constant(x), _of_grid(resolve(fmt), amax), axis, amax)
    steps: Tensor = _operator(x.detach(), text_of(fmt, has_amax=amax is not None), axis, amax)[1]
    return steps


def grid_and_step(
    x: Tensor, fmt: AnySpec, *, axis: int = -1, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both `lies_on_grid` and `local_step`, with one search for the scale instead of two.

    Raises:
        TypeError: as for `quantise`.
        ValueError: as for `quantise`.
    """
    axis = checked_axis(x, axis, amax)
    if is_plain(x, amax):
        return _grid_and_step(constant(x), _of_grid(resolve(fmt), amax), axis, amax)
    on_grid, steps = _operator(x.detach(), text_of(fmt, has_amax=amax is not None), axis, amax)
    return on_grid, steps


@exact_in_pool
def _lies_on_grid(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor:
    match spec.fmt.family:
        case Family.GRID | Family.PYTHON:
            raise _needs_source(spec)
        case Family.HIF8 | Family.FP8:
            return fit_flat(x, spec, amax).on_grid
        case Family.NV:
            return fit_blocks(x, axis, spec, amax).on_grid
        case Family.MX | Family.BF16:
            return same(x, quantise(x, spec, axis=axis))


@exact_in_pool
def _local_step(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor:
    match spec.fmt.family:
        case Family.GRID | Family.PYTHON:
            raise _needs_source(spec)
        case Family.MX:
            x32 = _float32_copy(x)
            _mx_steps(x32, axis, spec)
            return x32
        case Family.NV:
            return fit_blocks(x, axis, spec, amax).steps
        case Family.HIF8 | Family.FP8:
            return _flat_steps(x, fit_flat(x, spec, amax).scale, spec)
        case Family.BF16:
            x32 = _float32_copy(x)
            return _of_finite_elements(binade_steps(x32.abs(), spec.fmt.element), x32)


@exact_in_pool
def _grid_and_step(
    x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    match spec.fmt.family:
        case Family.GRID | Family.PYTHON:
            raise _needs_source(spec)
        case Family.MX | Family.BF16:
            return _lies_on_grid(x, spec, axis, amax), _local_step(x, spec, axis, amax)
        case Family.NV:
            blocks = fit_blocks(x, axis, spec, amax)
            return blocks.on_grid, blocks.steps
        case Family.HIF8 | Family.FP8:
            flat = fit_flat(x, spec, amax)
            return flat.on_grid, _flat_steps(x, flat.scale, spec)


def _needs_source(spec: QuantSpec) -> ValueError:
    return ValueError(
        f"the scales of {spec.fmt.name} do not follow from quantised values: take "
        "quantexp.formats.declared.origin.stems_from with the tensor before quantisation"
    )


def _of_operator(x: Tensor, spec: str, axis: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    on_grid, steps = _grid_and_step(x, _of_grid(spec_of(spec), amax), axis, amax)
    return on_grid.contiguous(), steps.contiguous()


def _shapes_of_operator(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.bool), x.new_empty(x.shape, dtype=torch.float32)


_operator = operator(
    "grid_and_step",
    "(Tensor x, str spec, int axis, Tensor? amax) -> (Tensor, Tensor)",
    _of_operator,
    _shapes_of_operator,
    with_blocks_of_examples,
)


def _float32_copy(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _flat_steps(x: Tensor, scale: Tensor | None, spec: QuantSpec) -> Tensor:
    x32 = _float32_copy(x)
    return _of_finite_elements(flat_steps(x32, scale, spec), x32)


def _of_finite_elements(step: Tensor, x32: Tensor) -> Tensor:
    return step.masked_fill_(x32 == 0, 0.0).masked_fill_(~x32.isfinite(), torch.nan)


def _of_grid(spec: QuantSpec, amax: Tensor | None) -> QuantSpec:
    """The specification by which a tensor on the grid stays as it is: rounded to nearest, and infinity kept."""
    check_amax(spec, amax is not None)
    saturate = "saturate" not in spec.fmt.options
    if (spec.rounding, spec.pre_scale, spec.saturate) == (spec.fmt.rounding, False, saturate):
        return spec
    return replace(spec, rounding=spec.fmt.rounding, pre_scale=False, saturate=saturate)


def _mx_steps(x32: Tensor, axis: int, spec: QuantSpec) -> None:
    """Overwrite x (float32, contiguous) with the step at each element."""
    extents = outer_axis_inner(x32.shape, axis)
    x_ONI = x32.view(extents)
    limit = chunk_limit(x32.device)
    scratch = Scratch(scratch_size(x_ONI, spec.block, limit), x32.device)
    for chunk in chunks(extents, spec.block, limit):
        x_OBKI = chunk.elements(x_ONI)
        copy, magnitude, _ = scratch.of_shape(x_OBKI.shape)
        copy.copy_(x_OBKI)
        amax_bits = block_amax_bits(copy, magnitude)
        field = scale_field(amax_bits, spec.fmt.element, spec.scale_rule)
        is_zero = magnitude == 0
        step = binade_steps(magnitude.mul_(inverse_power_of_two(field)), spec.fmt.element)
        x_OBKI.copy_(step.masked_fill_(is_zero, 0.0).mul_(power_of_two(field)))
