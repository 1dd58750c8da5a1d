"""Judges operands in declared formats, whose values alone do not show their scales, by their sources."""

from __future__ import annotations

from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.formats.declared.by_python import contained
from quantexp.proof.grids import Finding, Status
from quantexp.proof.origin import off_grid, scale_amax
from quantexp.quant.whole_amax import transformed

#: Why an operand in a Python format is not judged.
UNPROVED = "declared, cannot be proved: its class has no contains"


def by_source(
    x: Tensor, spec: QuantSpec, axis: int, source: Tensor, whole_amax: Tensor | None
) -> Finding:
    """Judge an operand in the family `grid`, whose scales follow from its source."""
    known = scale_amax(spec, source, axis) if whole_amax is None else whole_amax
    off, differ = off_grid(x, spec, source, axis, known)
    if off:
        return Finding(
            Status.MISMATCH,
            f"{off} of {x.numel()} elements are not its source on the grid of {spec.fmt.name}",
            quantised=differ > 0,
        )
    return _of(differ)


def by_contains(x: Tensor, spec: QuantSpec, axis: int, source: Tensor) -> Finding:
    """Judge an operand in a format in Python, whose class says which values are its own, if it says so."""
    contains = contained(x, spec.fmt, axis)
    differ = int((x != transformed(source, spec, axis)).sum())
    if contains is None:
        return Finding(Status.DECLARED, UNPROVED, quantised=differ > 0)
    if off := int((~contains).sum()):
        return Finding(
            Status.MISMATCH,
            f"{off} of {x.numel()} elements are none of {spec.fmt.name}, by its contains",
            quantised=differ > 0,
        )
    return _of(differ)


def _of(differ: int) -> Finding:
    """The finding where no element is wrong, by the number that differ from the source."""
    if not differ:
        return Finding(Status.INCONCLUSIVE, "on the grid anyway")
    return Finding(Status.ENGAGED, quantised=True)
