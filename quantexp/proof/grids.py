"""The grids that an operand may lie on, and which of them produced it.

A quantised operand lies on its format's grid. That alone is weak evidence: values on a coarse grid often lie on a finer
one too, so a tensor cast to E5M2 passes as E4M3. The second question is therefore which format produced the operand.
For every other format of the table (and for none at all) this module counts the elements around which the declared
format has the finer grid; each of them lies on the coarser grid by accident with a probability of at most one half.
For NVFP4 and MXFP4, which have the same element, it counts one element per block: their scales differ.
If at least `EVIDENCE` such elements all lie on the coarser grid, the operand went through that format (by accident:
2^-64). Tensors whose values are all powers of two (masks, one-hot rows) lie on every grid and prove nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
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

#: Elements that must agree before a grid counts as proved.
EVIDENCE = 64
#: Divisor for the number of lines of a window that are examined first.
_FEW_LINES = 8
#: Largest number of distinct significands of an operand of both signs that is not in the working precision.
MOST_SIGNIFICANDS = 16
#: No window on a grid with blocks or a tensor scale has more distinct significands, see `_are_too_many_everywhere`.
_MOST_OF_ANY_GRID = 64


class Status(Enum):
    """The result for one slot after the first iteration."""

    ENGAGED = "engaged"
    INCONCLUSIVE = "inconclusive"
    #: A format in Python that does not say which values are its own.
    DECLARED = "declared"
    MISMATCH = "mismatch"
    NOT_REACHED = "not_reached"


@dataclass(frozen=True)
class Finding:
    """The result for one operand in one call."""

    status: Status
    #: The reason; of `engaged` only what was not compared.
    reason: str = ""
    #: Whether the operand lies on the grid of a number format coarser than the working precision.
    quantised: bool = False


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


def which_grid(
    windows: Tensor, amax: Tensor, format_: str, declared: Grid | None, declared_amax: Tensor
) -> Finding:
    """The format that produced the elements, all of which lie on the declared grid."""
    working = _working_step(windows)
    step = working if declared is None else declared.step(windows, declared_amax)
    mantissa = torch.frexp(windows.float().abs()).mantissa
    exceeded = _bits_exceeded_everywhere(mantissa, declared)
    too_many = declared is None and _are_too_many_everywhere(windows, mantissa)
    for other in OTHERS:
        if declared is not None and other.format == declared.format:
            continue
        if other.block is not None and windows.shape[-2 if other.across else -1] == 1:
            continue  # a block of one element is its own scale: on the grid by construction, not by accident
        if other.never_saturates and (too_many or other.significant_bits in exceeded):
            continue
        coarser_scales = declared is not None and has_coarser_scales(other, declared)
        if (
            not coarser_scales
            and not other.searches_scale
            and _is_soon_off(other, windows, amax, step, working)
        ):
            continue
        on_grid, other_step = other.both(windows, amax)
        telling = _telling(other, other_step, windows, step, working)
        if other.spec.fmt.block_scale and other.block is not None:
            telling &= _has_company(windows, other.block, -2 if other.across else -1)
        if coarser_scales:
            assert declared is not None
            telling |= _largest_of_blocks(windows, declared.block)
        enough = telling.flatten(1).sum(dim=1) >= EVIDENCE
        lie_on = enough & ~(telling & ~on_grid).flatten(1).any(dim=1)
        if bool(_is_varied(mantissa[lie_on], telling[lie_on]).any()):
            return Finding(
                Status.MISMATCH,
                f"it lies on the grid of {other.format}, which {format_} would not give",
                quantised=True,
            )
    if too_many:
        return Finding(Status.ENGAGED)
    if declared is None:
        return _plain(windows)
    if not bool(_is_evidence(mantissa, (windows != 0) & (step > working)).any()):
        return Finding(Status.INCONCLUSIVE, "on the grid anyway")
    return Finding(Status.ENGAGED, quantised=True)


def _bits_exceeded_everywhere(mantissa: Tensor, declared: Grid | None) -> set[int]:
    """The numbers of significant bits that some element of every window exceeds.

    A grid whose values have at most that many bits does not contain such an element and is coarser around it. Proof:
    the element is a multiple of the declared grid's step; if the other's step were no larger, both being powers of two,
    it would be a multiple of that step, too. So each window has a telling element off that grid, for any scales. The
    set is empty if the declared grid's steps are not powers of two.
    """
    if declared is not None and declared.significant_bits is None:
        return set()
    exceeded = set()
    for bits in sorted({grid.significant_bits for grid in OTHERS if grid.significant_bits}):
        if not bool((mantissa * 2**bits).frac().flatten(1).any(dim=1).all()):
            break
        exceeded.add(bits)
    return exceeded


def _are_too_many_everywhere(windows: Tensor, mantissa: Tensor) -> bool:
    """Whether each window in the working precision has more distinct significands than any grid leaves.

    An element of at most four significant bits has at most 8 significands. A tensor scale leaves 8, too. An exact scale
    is known up to two steps of the working precision in either direction, so at most 5 values are near each. A block
    scale of NVFP4 multiplies its 8 significands with 2 of the element; at most 3 values are near each of these 16.

    So 48 are the most, and a window with more has a normal element off the grid. That element is telling: the step of
    the grid is at least a sixteenth of it, that of the working precision at most a 128th.
    """
    normal = windows.abs() >= torch.finfo(windows.dtype).smallest_normal
    ordered = mantissa.masked_fill(~normal, 0.0).flatten(1).sort(dim=1).values
    return bool(((ordered.diff(dim=1) > 0).sum(dim=1) > _MOST_OF_ANY_GRID).all())


def _telling(
    other: Grid, other_step: Tensor, windows: Tensor, step: Tensor, working: Tensor
) -> Tensor:
    """The elements around which another grid is coarser than the declared one, by enough to distinguish them."""
    return (windows != 0) & (other_step > step) & (other_step > other.margin * working)


def _has_company(windows: Tensor, block: int, dim: int) -> Tensor:
    """Whether another element of an element's block is not zero; one alone is its own scale, with any significand."""
    is_nonzero = (windows != 0).movedim(dim, -1)
    extent = is_nonzero.shape[-1]
    padded = torch.nn.functional.pad(is_nonzero, (0, -extent % block))
    several = padded.reshape(*padded.shape[:-1], -1, block).sum(dim=-1) > 1
    return several.repeat_interleave(block, dim=-1)[..., :extent].movedim(-1, dim)


def _is_soon_off(other: Grid, windows: Tensor, amax: Tensor, step: Tensor, working: Tensor) -> bool:
    """Whether a few lines of every window already have a telling element off another grid, which is the usual case.

    The lines are whole lines along the grid's blocks. This is valid only for a grid whose scales do not depend on what
    fits most elements: a few lines could give another scale.
    """
    lines = -1 if other.across else -2
    few = max(1, windows.shape[lines] // _FEW_LINES)
    windows, step, working = (x.narrow(lines, 0, few) for x in (windows, step, working))
    on_grid, other_step = other.both(windows, amax)
    off = _telling(other, other_step, windows, step, working) & ~on_grid
    return bool(off.flatten(1).any(dim=1).all())


def _largest_of_blocks(windows: Tensor, block: int | None) -> Tensor:
    """A mask of the largest element of each block along the last axis; none for a block of zeros."""
    *outer, width = windows.shape
    assert block is not None
    size = min(block, width)
    blocks = windows[..., : width // size * size].reshape(*outer, -1, size).abs()
    largest = torch.zeros_like(blocks, dtype=torch.bool)
    largest.scatter_(-1, blocks.argmax(dim=-1, keepdim=True), True)
    mask = torch.zeros_like(windows, dtype=torch.bool)
    mask[..., : width // size * size] = (largest & (blocks > 0)).flatten(-2)
    return mask


def _plain(windows: Tensor) -> Finding:
    """Whether an operand in the working precision uses it: any scaled small float has few distinct significands.

    An 8-bit float with any tensor scale has at most 8 significands of one sign times the scale's, where 16-bit data
    has most of its 128 or more. Only tensors of both signs are tested: flat attention probabilities are 1/n.
    """
    values = windows[windows.abs() >= torch.finfo(windows.dtype).smallest_normal].float()
    if values.numel() < 4 * EVIDENCE or not bool((values > 0).any() & (values < 0).any()):
        return Finding(Status.ENGAGED)
    significands = torch.unique(torch.frexp(values.abs()).mantissa).numel()
    if 1 < significands <= MOST_SIGNIFICANDS:
        return Finding(
            Status.MISMATCH,
            f"it has only {significands} distinct significands, as a scaled 8-bit float has",
            quantised=True,
        )
    return Finding(Status.ENGAGED)


def _working_step(x: Tensor) -> Tensor:
    """The spacing of x's own dtype around each element, subnormals included."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.float())
    significant_bits = 1 - int(math.log2(info.eps))
    step = torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - significant_bits)
    return step.clamp_min(info.smallest_normal * info.eps)


def _is_evidence(mantissa: Tensor, telling: Tensor) -> Tensor:
    """For each window: whether there are enough telling elements, and not all equal up to powers of two."""
    low = mantissa.masked_fill(~telling, 2.0).flatten(1).amin(dim=1)
    high = mantissa.masked_fill(~telling, 0.0).flatten(1).amax(dim=1)
    return (telling.flatten(1).sum(dim=1) >= EVIDENCE) & (low < high)


def _is_varied(mantissa: Tensor, telling: Tensor) -> Tensor:
    """For each window: whether there are enough telling elements besides those of the most frequent significand.

    Equal elements lie on a grid together: one accident, however many they are. Attention gives the same row to all
    tokens that see one token alone. A grid whose steps are not powers of two may also be coarser in a narrow range of
    significands only, in which a single significand of the declared grid lies. Two neighbours on the declared grid
    cannot both lie on a coarser one.
    """
    varied = torch.zeros(len(telling), dtype=torch.bool, device=telling.device)
    for i, (values, mask) in enumerate(zip(mantissa, telling, strict=True)):
        counts = torch.unique(values[mask], return_counts=True)[1]
        varied[i] = bool(counts.numel()) and int(counts.sum() - counts.max()) >= EVIDENCE
    return varied
