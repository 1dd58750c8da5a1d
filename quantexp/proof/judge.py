"""One operand of one matrix product: does it lie on the declared grid, and is there proof that it does?

An operand that was quantised lies on its format's grid. That alone is weak: what lies on a coarse grid often lies
on a finer one too, so a tensor cast to E5M2 passes as E4M3. The second question is therefore which format it went
through. For every other format of the table (and for none at all) the elements are counted for which the declared
format has the finer grid; each of them lies on the coarser grid by accident with a probability of at most one half.
If at least `EVIDENCE` such elements all lie on the coarser grid, the operand went through that format (by accident:
2^-64). Values that are all powers of two (masks, one-hot rows) lie on every grid and prove nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import lies_on_grid, local_step
from quantexp.formats.types import ScaleRule, Scaling
from quantexp.quant.slots import FORWARD_AMAX, GRADIENT_AMAX, Operand

#: Why an operand with NaN or Inf cannot be judged; the next iteration is watched then.
NOT_FINITE = "not finite"
#: Elements that must agree before a grid is believed.
EVIDENCE = 64
#: Parts of an operand that are looked at for the question which other format it could be.
WINDOWS = 16
#: Distinct significands up to which an operand of both signs cannot be of the working precision.
MOST_SIGNIFICANDS = 16


class Status(Enum):
    """What is known of one slot after the first iteration."""

    ENGAGED = "engaged"
    INCONCLUSIVE = "inconclusive"
    MISMATCH = "mismatch"
    NOT_REACHED = "not_reached"


@dataclass(frozen=True)
class Finding:
    """The judgement of one operand in one call."""

    status: Status
    #: Why, for everything but `engaged`.
    reason: str = ""
    #: Whether the operand lies on the grid of a number format coarser than the working precision.
    quantised: bool = False


@dataclass(frozen=True)
class Grid:
    """A grid an operand may lie on: a format with what decides its scales."""

    format: str
    #: Along the axis that the declared blocks run along, or across it; a tensor scale has no axis.
    across: bool = False
    block: int | None = None
    scale_rule: ScaleRule | None = None
    scaling: Scaling | None = None
    amax_target: float | None = None

    @property
    def margin(self) -> float:
        """How many times coarser than another grid this one must be for an element to tell them apart.

        An exact scale is known to a rounding error only, half a step of the other grid each way: four times coarser
        leaves a quarter of the elements on this grid by accident.
        """
        return 4.0 if self.scaling is Scaling.EXACT else 1.0

    def holds(self, x: Tensor, amax: Tensor, axis: int = -1) -> Tensor:
        """Whether each element lies on this grid."""
        return lies_on_grid(x, self.format, **self._options(amax, axis))

    def step(self, x: Tensor, amax: Tensor, axis: int = -1) -> Tensor:
        """The grid's spacing around each element, 0 around 0."""
        return local_step(x, self.format, **self._options(amax, axis))

    def _options(self, amax: Tensor, axis: int) -> dict[str, Any]:
        options = {
            "block": self.block,
            "scale_rule": self.scale_rule,
            "scaling": self.scaling,
            "amax_target": self.amax_target,
        }
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        if self.scaling in (Scaling.CURRENT, Scaling.EXACT):
            given["amax"] = amax
        return {**given, "axis": -2 if self.across else axis}


def _others() -> list[Grid]:
    """Every grid that something undeclared could have put an operand on, the coarsest first.

    Under rceil a block's own amax is always representable, so content made with any scale rule lies on its grid.
    """
    mx = {
        name: [Grid(name, across, 32, ScaleRule.RCEIL) for across in (False, True)]
        for name in ("mxfp4_e2m1", "mxfp8_e5m2", "mxfp8_e4m3")
    }
    hif8 = [
        Grid("hifp8", scaling=scaling, amax_target=target)
        for scaling in (Scaling.CURRENT, Scaling.EXACT)
        for target in (FORWARD_AMAX, GRADIENT_AMAX)
    ]
    unscaled = Grid("hifp8", scaling=Scaling.NONE)
    return [*mx["mxfp4_e2m1"], *mx["mxfp8_e5m2"], unscaled, *hif8, *mx["mxfp8_e4m3"]]


OTHERS = _others()


def judge(x: Tensor, operand: Operand, axis: int) -> Finding:
    """Hold one operand against its declaration.

    Args:
        x: the operand as it reached the product.
        operand: what was declared for it.
        axis: the dimension of x that the declared blocks run along.
    """
    amax = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32) if x.numel() else None
    if amax is None or amax == 0:
        return Finding(Status.INCONCLUSIVE, "all zero")
    if not torch.isfinite(amax):
        return Finding(Status.INCONCLUSIVE, NOT_FINITE)
    declared = _declared(operand)
    if declared is not None:
        off = x.numel() - int(declared.holds(x, amax, axis).sum())
        if off:
            return Finding(
                Status.MISMATCH,
                f"{off} of {x.numel()} elements are not on the grid of {operand.format}",
            )
    return _which_grid(_windows(x, axis, operand.block), amax, operand.format, declared)


def _declared(operand: Operand) -> Grid | None:
    if not operand.quantised:
        return None
    return Grid(
        operand.format,
        False,
        operand.block,
        operand.scale_rule,
        operand.scaling,
        operand.amax_target,
    )


def _which_grid(windows: Tensor, amax: Tensor, format_: str, declared: Grid | None) -> Finding:
    """Which format's work the elements show, none of which is off the declared grid."""
    working = _working_step(windows)
    step = working if declared is None else declared.step(windows, amax)
    for other in OTHERS:
        if declared is not None and other.format == declared.format:
            continue
        coarser = (windows != 0) & (other.step(windows, amax) > other.margin * step)
        off = coarser & ~other.holds(windows, amax)
        if bool((_is_evidence(windows, coarser) & ~off.flatten(1).any(dim=1)).any()):
            return Finding(
                Status.MISMATCH,
                f"it lies on the grid of {other.format}, which {format_} would not give",
                quantised=True,
            )
    if declared is None:
        return _plain(windows)
    if not bool(_is_evidence(windows, (windows != 0) & (step > working)).any()):
        return Finding(Status.INCONCLUSIVE, "on the grid anyway")
    return Finding(Status.ENGAGED, quantised=True)


def _plain(windows: Tensor) -> Finding:
    """Whether an operand in the working precision uses it: any float scale leaves few distinct significands.

    An 8-bit float with any tensor scale has at most 8 significands of one sign times the scale's, where 16-bit data
    shows most of its 128 or more. Asked only of tensors of both signs: flat attention probabilities are 1/n.
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


def _is_evidence(windows: Tensor, telling: Tensor) -> Tensor:
    """For each window: enough telling elements, and not all the same up to powers of two."""
    mantissa = torch.frexp(windows.float().abs()).mantissa
    low = mantissa.masked_fill(~telling, 2.0).flatten(1).amin(dim=1)
    high = mantissa.masked_fill(~telling, 0.0).flatten(1).amax(dim=1)
    return (telling.flatten(1).sum(dim=1) >= EVIDENCE) & (low < high)


def _windows(x: Tensor, axis: int, block: int | None) -> Tensor:
    """Parts of x, spread evenly, as [windows, lines, elements along the axis]: whole blocks both ways.

    Each is 32 lines of at least 64 elements (fewer where x has fewer), starting at multiples of these.
    """
    lines = x.movedim(axis, -1)
    while lines.dim() < 3:
        lines = lines.unsqueeze(0)
    height, width = min(32, lines.shape[-2]), min(max(64, block or 0), lines.shape[-1])
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
