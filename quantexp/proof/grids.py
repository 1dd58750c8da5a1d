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

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from quantexp.formats.bits import EXPONENT_MASK, as_bits
from quantexp.proof.candidates import OTHERS, Grid, has_coarser_scales, telling_elements
from quantexp.proof.exclusion import Exclusion

#: Elements that must agree before a grid counts as proved.
EVIDENCE = 64
#: Lines of a window whose significands are counted first.
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


#: The finding if nothing distinguishes the declared grid from the working precision.
_ANYWAY = Finding(Status.INCONCLUSIVE, "on the grid anyway")


def which_grid(
    windows: Tensor, amax: Tensor, format_: str, declared: Grid | None, declared_amax: Tensor
) -> Finding:
    """The format that produced the elements, all of which lie on the declared grid."""
    all_windows, windows = windows, _with_enough(windows)
    if not len(windows):
        return _plain(all_windows) if declared is None else _ANYWAY
    working = _working_step(windows)
    step = working if declared is None else declared.step(windows, declared_amax)
    mantissa = torch.frexp(windows.float().abs()).mantissa
    exclusion = Exclusion(declared, windows, amax, step, working)
    too_many = declared is None and any(
        _are_too_many_everywhere(windows[:, lines], mantissa[:, lines])
        for lines in (slice(_FEW_LINES), slice(None))
    )
    for other in OTHERS:
        if declared is not None and other.format == declared.format:
            continue
        if other.block is not None and windows.shape[-2 if other.across else -1] == 1:
            continue  # a block of one element is its own scale: on the grid by construction, not by accident
        if too_many and other.never_saturates:
            continue
        if exclusion.excludes(other) or not lies_on(other, exclusion, mantissa):
            continue
        return Finding(
            Status.MISMATCH,
            f"it lies on the grid of {other.format}, which {format_} would not give",
            quantised=True,
        )
    if too_many:
        return Finding(Status.ENGAGED)
    if declared is None:
        return _plain(all_windows)
    for some in (slice(1), slice(1, None)):  # usually the first window suffices
        telling = (windows[some] != 0) & (step[some] > working[some])
        if bool(_is_evidence(mantissa[some], telling).any()):
            return Finding(Status.ENGAGED, quantised=True)
    return _ANYWAY


def _with_enough(windows: Tensor) -> Tensor:
    """The windows with enough elements for evidence; a causal mask leaves some without."""
    counts = torch.count_nonzero(windows, dim=(1, 2))
    few = counts < EVIDENCE
    return windows[~few] if bool(few.any()) else windows


def lies_on(other: Grid, seen: Exclusion, mantissa: Tensor) -> bool:
    """Whether a window has enough telling elements, and all of them lie on another grid."""
    windows, declared = seen.windows, seen.declared
    on_grid, other_step = other.both(windows, seen.amax)
    dim = -2 if other.across else -1
    telling = telling_elements(other, other_step, windows, seen.step, seen.working, dim)
    if declared is not None and has_coarser_scales(other, declared):
        telling |= _largest_of_blocks(windows, declared.block)
    enough = telling.flatten(1).sum(dim=1) >= EVIDENCE
    all_on = enough & ~(telling & ~on_grid).flatten(1).any(dim=1)
    return bool(_is_varied(mantissa[all_on], telling[all_on]).any())


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
    binade = as_bits(x.float()).bitwise_and(EXPONENT_MASK).view(torch.float32)
    return binade.mul_(info.eps).clamp_min_(info.smallest_normal * info.eps)


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
