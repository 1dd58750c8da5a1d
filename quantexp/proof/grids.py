"""Grids that an operand may lie on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantexp.formats import (
    FORMATS,
    QuantSpec,
    grid_and_step,
    lies_on_grid,
    local_step,
    resolve,
)
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
    def significant_bits(self) -> int | None:
        """The largest number of significant bits of a value on it; None unless every step is a power of two."""
        fmt = self.spec.fmt
        if fmt.family is Family.MX or (fmt.family is Family.HIF8 and self.margin == 0):
            return fmt.element.mantissa_bits + 1
        return None

    @property
    def never_saturates(self) -> bool:
        """Whether the largest element determines the scale, so that no element exceeds the format's largest value."""
        return self.block is not None or self.searches_scale

    @property
    def searches_scale(self) -> bool:
        """Whether the tensor scale is found by trying several and keeping the one that fits most elements."""
        return self.spec.is_scaled

    def contains(self, x: Tensor, amax: Tensor, axis: int) -> Tensor:
        """Whether each element lies on this grid."""
        return lies_on_grid(x, self.spec, axis=self._axis(axis), amax=self._amax(amax))

    def step(self, x: Tensor, amax: Tensor) -> Tensor:
        """The grid's spacing around each element, 0 around 0, along the last axis."""
        return local_step(x, self.spec, axis=self._axis(-1), amax=self._amax(amax))

    def both(self, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """`contains` and `step`, along the last axis."""
        return grid_and_step(x, self.spec, axis=self._axis(-1), amax=self._amax(amax))

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
        case Family.BF16:
            return []


OTHERS = _others()


def has_coarser_scales(other: Grid, declared: Grid) -> bool:
    """Whether both have the same element, and only the declared one's block scales have a mantissa.

    A block quantised to the declared format then lies on the other's grid for at most half of its possible scales, so
    one element of it is evidence.
    """
    theirs, ours = other.spec.fmt, declared.spec.fmt
    return theirs.element == ours.element and bool(ours.block_scale) and not theirs.block_scale
