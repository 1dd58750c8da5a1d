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

#: Elements that must agree before a grid is believed.
EVIDENCE = 64
#: Elements looked at for the question which other format it could be; whole lines along the reduced axis.
SAMPLE = 1 << 14


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
        return {**given, "axis": 0 if self.across else axis}


def _others() -> list[Grid]:
    """Every grid that something undeclared could have put an operand on, the coarsest first.

    Under rceil a block's own amax is always representable, so content made with any scale rule lies on its grid.
    """
    mx = {
        name: [Grid(name, across, 32, ScaleRule.RCEIL) for across in (False, True)]
        for name in ("mxfp4_e2m1", "mxfp8_e5m2", "mxfp8_e4m3")
    }
    hif8 = [
        Grid("hifp8", scaling=Scaling.CURRENT, amax_target=target)
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
        return Finding(Status.INCONCLUSIVE, "not finite")
    declared = _declared(operand)
    if declared is not None:
        off = x.numel() - int(declared.holds(x, amax, axis).sum())
        if off:
            return Finding(
                Status.MISMATCH,
                f"{off} of {x.numel()} elements are not on the grid of {operand.format}",
            )
    return _which_grid(_sample(x, axis), amax, operand.format, declared)


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


def _which_grid(lines: Tensor, amax: Tensor, format_: str, declared: Grid | None) -> Finding:
    """Which format's work the elements show, none of which is off the declared grid."""
    working = _working_step(lines)
    step = working if declared is None else declared.step(lines, amax)
    for other in OTHERS:
        if declared is not None and other.format == declared.format:
            continue
        coarser = (lines != 0) & (other.step(lines, amax) > step)
        if _is_evidence(lines[coarser]) and bool(other.holds(lines, amax)[coarser].all()):
            return Finding(
                Status.MISMATCH,
                f"it lies on the grid of {other.format}, which {format_} would not give",
                quantised=True,
            )
    if declared is None:
        return Finding(Status.ENGAGED)
    if not _is_evidence(lines[(lines != 0) & (step > working)]):
        return Finding(Status.INCONCLUSIVE, "on the grid anyway")
    return Finding(Status.ENGAGED, quantised=True)


def _working_step(x: Tensor) -> Tensor:
    """The spacing of x's own dtype around each element."""
    _, exponent = torch.frexp(x.float())
    significant_bits = 1 - int(math.log2(torch.finfo(x.dtype).eps))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - significant_bits)


def _is_evidence(x: Tensor) -> bool:
    """Enough elements, and not all the same up to powers of two."""
    if x.numel() < EVIDENCE:
        return False
    mantissa, _ = torch.frexp(x.float().abs())
    return not bool((mantissa == mantissa[0]).all())


def _sample(x: Tensor, axis: int) -> Tensor:
    """Lines along the axis as [lines, length]: runs of 32 neighbours, spread evenly, at most about `SAMPLE` elements.

    Neighbours, so that blocks of 32 across the lines stay whole too.
    """
    lines = x.movedim(axis, -1)
    lines = lines.unsqueeze(0) if lines.dim() == 1 else lines
    stacks = math.prod(lines.shape[:-2])
    runs_each = -(-lines.shape[-2] // 32)
    num_runs = min(stacks * runs_each, max(1, SAMPLE // (32 * lines.shape[-1])))
    picked = []
    for i in range(num_runs):
        run = i * (stacks * runs_each - 1) // max(1, num_runs - 1)
        stack = lines
        for index in _unravel(run // runs_each, lines.shape[:-2]):
            stack = stack[index]
        picked.append(stack[32 * (run % runs_each) :][:32])
    return torch.cat(picked)


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    indices: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        indices.insert(0, index)
    return indices
