"""Judges one operand of one matrix product: does it lie on the declared grid, and is there proof?

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

from quantexp.formats import QuantSpec
from quantexp.processes.threads import threads
from quantexp.proof.grids import OTHERS, Grid, has_coarser_scales
from quantexp.proof.origin import FAR, distance, needs_origin, scale_amax

#: The reason why an operand with NaN or Inf cannot be judged; the next iteration is then watched instead.
NOT_FINITE = "not finite"
#: Elements that must agree before a grid counts as proved.
EVIDENCE = 64
#: Parts of an operand that are examined for other formats.
WINDOWS = 16
#: Divisor for the number of lines of a window that are examined first.
_FEW_LINES = 8
#: Largest number of distinct significands of an operand of both signs that is not in the working precision.
MOST_SIGNIFICANDS = 16


class Status(Enum):
    """The result for one slot after the first iteration."""

    ENGAGED = "engaged"
    INCONCLUSIVE = "inconclusive"
    MISMATCH = "mismatch"
    NOT_REACHED = "not_reached"


@dataclass(frozen=True)
class Finding:
    """The result for one operand in one call."""

    status: Status
    #: The reason, for every status except `engaged`.
    reason: str = ""
    #: Whether the operand lies on the grid of a number format coarser than the working precision.
    quantised: bool = False


def judge(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    source: Tensor | None = None,
    whole_amax: Tensor | None = None,
) -> Finding:
    """Compare one operand with its declaration.

    Args:
        x: the operand that reached the product.
        spec: its declaration.
        axis: the dimension of x that the declared blocks run along.
        source: the operand before quantisation, in x's shape; required if `needs_origin` (see `origin`).
        whole_amax: if x is part of a tensor whose scale depends on its amax, the amax of the whole tensor.
    """
    amax = _amax(x) if x.numel() else None
    if amax is None or amax == 0:
        return Finding(Status.INCONCLUSIVE, "all zero")
    if not torch.isfinite(amax):
        return Finding(Status.INCONCLUSIVE, NOT_FINITE)
    if needs_origin(spec) and source is None:
        return Finding(
            Status.MISMATCH,
            "its source before quantisation is missing, and it cannot be judged without",
        )
    declared = Grid(spec) if spec.quantised else None
    declared_amax = amax
    if declared is not None:
        if whole_amax is not None:
            declared_amax = whole_amax
        elif source is not None and (known := scale_amax(spec, source, axis)) is not None:
            declared_amax = known
        off = x.numel() - int(declared.contains(x, declared_amax, axis).sum())
        if off:
            return Finding(
                Status.MISMATCH,
                f"{off} of {x.numel()} elements are not on the grid of {spec.fmt.name}",
            )
    if spec.is_transformed and source is not None:
        far = distance(x, spec, source, axis)
        if not far < FAR:
            return Finding(
                Status.MISMATCH,
                f"it is not the {spec.hadamard.value} Hadamard transform of its source: their relative distance is "
                f"{far:.2f}",
                quantised=True,
            )
    windows = _windows(x, axis, spec.block)
    with threads(1):
        return _which_grid(windows, amax, spec.fmt.name, declared, declared_amax)


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude, float32; NaN if there is NaN. `torch.linalg.vector_norm` takes 20 times as long."""
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).to(torch.float32)


def _which_grid(
    windows: Tensor, amax: Tensor, format_: str, declared: Grid | None, declared_amax: Tensor
) -> Finding:
    """The format that produced the elements, all of which lie on the declared grid."""
    working = _working_step(windows)
    step = working if declared is None else declared.step(windows, declared_amax)
    mantissa = torch.frexp(windows.float().abs()).mantissa
    exceeded = _bits_exceeded_everywhere(mantissa, declared)
    for other in OTHERS:
        if declared is not None and other.format == declared.format:
            continue
        if other.block is not None and windows.shape[-2 if other.across else -1] == 1:
            continue  # a block of one element is its own scale: on the grid by construction, not by accident
        if other.never_saturates and other.significant_bits in exceeded:
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
        if coarser_scales:
            assert declared is not None
            telling |= _largest_of_blocks(windows, declared.block)
        evidence = _is_evidence(mantissa, telling)
        if not bool(evidence.any()):
            continue
        off = telling & ~on_grid
        if bool((evidence & ~off.flatten(1).any(dim=1)).any()):
            return Finding(
                Status.MISMATCH,
                f"it lies on the grid of {other.format}, which {format_} would not give",
                quantised=True,
            )
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


def _telling(
    other: Grid, other_step: Tensor, windows: Tensor, step: Tensor, working: Tensor
) -> Tensor:
    """The elements around which another grid is coarser than the declared one, by enough to distinguish them."""
    return (windows != 0) & (other_step > step) & (other_step > other.margin * working)


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


def _windows(x: Tensor, axis: int, block: int) -> Tensor:
    """Evenly spread parts of x, as [windows, lines, elements along the axis], with whole blocks in both directions.

    Each has 32 lines of at least 64 elements (fewer if x has fewer), starting at multiples of these.
    """
    lines = x.movedim(axis, -1)
    while lines.dim() < 3:
        lines = lines.unsqueeze(0)
    height, width = min(32, lines.shape[-2]), min(max(64, block), lines.shape[-1])
    counts = (*lines.shape[:-2], lines.shape[-2] // height, lines.shape[-1] // width)
    total = math.prod(counts)
    picked = []
    for i in range(min(WINDOWS, total)):
        *stack, row, column = _unravel(
            i * (total - 1) // max(1, WINDOWS - 1) if total > WINDOWS else i, counts
        )
        window = lines[tuple(stack)] if stack else lines
        picked.append(
            window[row * height : (row + 1) * height, column * width : (column + 1) * width]
        )
    return torch.stack(picked)


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    indices: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        indices.insert(0, index)
    return indices
