"""The grids that an operand may lie on, and the elements that distinguish two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats import (
    FORMATS,
    QuantSpec,
    grid_and_step,
    local_step,
    resolve,
)
from quantexp.formats.grid import num_off_grid
from quantexp.formats.quantising import quantise_dense
from quantexp.formats.scale_search import flat_at_each_scale
from quantexp.formats.types import Family, Format, ScaleRule, Scaling
from quantexp.quant.choosing import FORWARD_AMAX, GRADIENT_AMAX


@dataclass(frozen=True)
class Grid:
    """The grid of a specification, of which only what determines the scales counts."""

    spec: QuantSpec
    #: Blocks run along the axis of the declared blocks, or across it; a tensor scale has no axis.
    across: bool = False

    @property
    def format(self) -> str:
        """The format's name."""
        return self.spec.fmt.name

    @property
    def block(self) -> int | None:
        """Elements of a block; None without blocks."""
        return None if self.spec.fmt.block is None else self.spec.block

    @property
    def margin(self) -> float:
        """The minimum ratio of this grid's step to the working precision's for an element to distinguish the two.

        An exact scale is known only up to a rounding error, half a step of the working precision in each direction:
        even at a ratio of four, a quarter of all values lie on this grid by accident.
        """
        return 4.0 if self.spec.scaling is Scaling.EXACT else 0.0

    @property
    def has_binary_steps(self) -> bool:
        """Whether the spacing around every element is a power of two."""
        return self.spec.fmt.family is not Family.NV and self.margin == 0

    @property
    def mantissa_bits(self) -> int:
        """Of an element, the most that any has."""
        return self.spec.fmt.element.mantissa_bits

    def smallest_step(self, amax: Tensor) -> Tensor:
        """A bound on the spacing around the smallest elements, at a scale for this amax; not for HiF8 and NVFP4.

        The scale of MX is the smallest power of two that is no less than amax / max (rceil). For a tensor scale there
        is a factor of two to spare.
        """
        element = self.spec.fmt.element
        limit = self.spec.amax_target if self.searches_scale else element.max
        mantissa, exponent = torch.frexp(amax / limit)
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1) + self.searches_scale
        lowest = element.emin - element.mantissa_bits
        return torch.ldexp(torch.ones_like(amax), exponent.clamp_min(-127) + lowest)

    @property
    def never_saturates(self) -> bool:
        """Whether the largest element determines the scale, so that no element exceeds the format's largest value."""
        return self.block is not None or self.searches_scale

    def reaches(self, amax: Tensor) -> bool:
        """Whether no value up to amax exceeds the format's largest value."""
        return self.never_saturates or bool(amax <= self.spec.fmt.element.max)

    @property
    def searches_scale(self) -> bool:
        """Whether the tensor scale is found by trying several and keeping the one that fits most elements."""
        return self.spec.is_scaled

    def num_off(self, x: Tensor, amax: Tensor, axis: int) -> int:
        """The number of elements that do not lie on this grid."""
        return num_off_grid(x, self.spec, axis=self._axis(axis), amax=self._amax(amax))

    def step(self, x: Tensor, amax: Tensor) -> Tensor:
        """The grid's spacing around each element, 0 around 0, along the last axis."""
        return local_step(x, self.spec, axis=self._axis(-1), amax=self._amax(amax))

    def both(self, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each element lies on this grid, and `step`, along the last axis."""
        return grid_and_step(x, self.spec, axis=self._axis(-1), amax=self._amax(amax))

    def requantised(self, x: Tensor) -> Tensor:
        """A contiguous tensor quantised to this grid, without a tensor scale, with blocks along its last axis."""
        y = torch.empty_like(x)
        quantise_dense(x, y, self.spec, x.ndim - 1, None, None)
        return y

    def at_each_scale(self, x: Tensor, amax: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """`both` at each tensor scale that a format without blocks may find, [scales, *x.shape]; see there."""
        return flat_at_each_scale(x, self.spec, self._amax(amax))

    def _axis(self, axis: int) -> int:
        return -2 if self.across else axis

    def _amax(self, amax: Tensor) -> Tensor | None:
        return amax if self.spec.is_scaled else None


def _others() -> list[Grid]:
    """Every grid that undeclared quantisation could have moved an operand to.

    Under rceil a block's own amax is always representable, so values produced under any scale rule lie on its grid.
    """
    grids = [grid for fmt in FORMATS.values() for grid in _grids_of(fmt)]
    first = ("mxfp4_e2m1", "mxfp8_e5m2", "hifp8", "mxfp8_e4m3")
    ordered = [grid for name in first for grid in grids if grid.format == name]
    return [*ordered, *(grid for grid in grids if grid.format not in first)]


def _grids_of(fmt: Format) -> list[Grid]:
    match fmt.family:
        case Family.MX:
            spec = resolve(fmt, scale_rule=ScaleRule.RCEIL)
            return [Grid(spec, across) for across in (False, True)]
        case Family.NV:
            return [Grid(resolve(fmt), across) for across in (False, True)]
        case Family.FP8:
            return [Grid(resolve(fmt))]
        case Family.HIF8:
            scaled = [
                Grid(resolve(fmt, scaling=scaling, amax_target=target))
                for scaling in (Scaling.CURRENT, Scaling.EXACT)
                for target in (FORWARD_AMAX, GRADIENT_AMAX)
            ]
            return [Grid(resolve(fmt)), *scaled]
        case Family.BF16 | Family.GRID | Family.PYTHON:
            return []


OTHERS = _others()


def has_coarser_scales(other: Grid, declared: Grid) -> bool:
    """Whether both have the same element, and only the declared one's block scales have a mantissa.

    A block quantised to the declared format then lies on the other's grid for at most half of its possible scales, so
    one element of it is evidence.
    """
    theirs, ours = other.spec.fmt, declared.spec.fmt
    return theirs.element == ours.element and bool(ours.block_scale) and not theirs.block_scale


def telling_elements(
    other: Grid, other_step: Tensor, windows: Tensor, step: Tensor, working: Tensor, dim: int
) -> Tensor:
    """The elements around which another grid, with blocks along `dim`, is coarser than the declared one.

    It must be so by enough to distinguish the two.
    """
    telling = (windows != 0) & (other_step > step) & (other_step > other.margin * working)
    if other.spec.fmt.block_scale and other.block is not None:
        telling &= _has_company(windows, other.block, dim)
    return telling


def _has_company(windows: Tensor, block: int, dim: int) -> Tensor:
    """Whether another element of an element's block is not zero; one alone is its own scale, with any significand."""
    is_nonzero = (windows != 0).movedim(dim, -1)
    extent = is_nonzero.shape[-1]
    padded = torch.nn.functional.pad(is_nonzero, (0, -extent % block))
    several = padded.reshape(*padded.shape[:-1], -1, block).sum(dim=-1) > 1
    return several.repeat_interleave(block, dim=-1)[..., :extent].movedim(-1, dim)
