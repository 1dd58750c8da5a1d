"""Groups numbers into series: a line, a row of a heat map or a bar.

Operands are judged as the run declared them, under requested formats, or, of statistics alone, under
`capture.format`; each of these is a group with figures of its own. Within a group a series is one operand of one
product (`fprop.x`) of one module; of statistics, whose operands are judged along one axis alone, one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from quantexp.analysis.chapter import Source
from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.measures.operand import UnderFormat
from quantexp.analysis.tensors.place import Place, experts_as_one, in_flow

AS_DECLARED = "as declared"
_PRODUCTS = ("fprop", "dgrad", "dgrad_q", "dgrad_k", "dgrad_p", "dgrad_v", "wgrad", "")


class Scale(Enum):
    """The scale of an axis."""

    LINEAR = "linear"
    #: Logarithmic, with powers of two.
    LOG2 = "log2"
    #: Fractions from 1e-6 to 1 on a logarithmic scale, and 0.
    SHARE = "share"
    #: Fractions on a linear scale.
    PERCENT = "percent"


@dataclass(frozen=True)
class Measure:
    """A measure of a tensor or operand, and its scale."""

    name: str
    label: str
    scale: Scale = Scale.LINEAR


SQNR = Measure("sqnr_db", "SQNR (dB)")
UNDERFLOW = Measure("underflow_share", "underflow (share of non-zero)", Scale.SHARE)
SATURATED = Measure("saturated_share", "saturated (share)", Scale.SHARE)
RELATIVE = Measure("relative_error", "mean relative error", Scale.PERCENT)
OPERAND_MEASURES = (SQNR, UNDERFLOW, SATURATED, RELATIVE)

AMAX = Measure("abs_max", "largest magnitude", Scale.LOG2)
STD = Measure("std", "standard deviation", Scale.LOG2)
KURTOSIS = Measure("kurtosis", "kurtosis (normal: 3)", Scale.LOG2)
ZEROS = Measure("zero_share", "zeros (share)", Scale.SHARE)
NONFINITE = Measure("nonfinite_share", "NaN and Inf (share)", Scale.SHARE)
TENSOR_MEASURES = (AMAX, STD, KURTOSIS, ZEROS)


@dataclass(frozen=True)
class Run:
    """One source with the measures of its tensors."""

    label: str
    scheme: str
    tensors: tuple[Measured, ...]


def runs_of(sources: Sequence[Source]) -> list[Run]:
    """The sources that have tensors."""
    return [Run(one.label, one.scheme, one.measures) for one in sources if one.measures]


@dataclass(frozen=True)
class Member:
    """One number of one tensor, with its series."""

    place: Place
    #: `fprop.x`, or the tensor's name.
    series: str
    value: float
    #: The position on an axis that is not part of the place.
    at: int = 0

    @property
    def module(self) -> str:
        """All experts as one."""
        return experts_as_one(self.place.module)


@dataclass(frozen=True)
class Judged:
    """One operand with its place."""

    place: Place
    series: str
    operand: UnderFormat

    @property
    def module(self) -> str:
        """All experts as one."""
        return experts_as_one(self.place.module)


def groups_of(run: Run) -> dict[str, list[Judged]]:
    """The judged operands of a run, by format: as declared, or the name of a requested format."""
    groups: dict[str, list[Judged]] = {}
    for one in run.tensors:
        for operand in one.operands:
            if not operand.slot and one.from_values:
                continue  # the axis that no product reduces over
            group = AS_DECLARED if operand.declared else operand.format
            series = operand.slot or one.place.tensor
            groups.setdefault(group, []).append(Judged(one.place, series, operand))
    return groups


def operand_members(judged: Iterable[Judged], measure: Measure) -> list[Member]:
    """One measure of the operands."""
    return [Member(j.place, j.series, getattr(j.operand.fidelity, measure.name)) for j in judged]


def tensor_members(tensors: Iterable[Measured], measure: Measure) -> list[Member]:
    """One measure of the tensors, without codes of scales."""
    return [
        Member(one.place, one.place.tensor, tensor_value(one, measure))
        for one in tensors
        if not one.place.is_scale
    ]


def tensor_value(one: Measured, measure: Measure) -> float:
    """The value of a measure for a tensor."""
    if measure is NONFINITE:
        return one.nonfinite / one.count if one.count else 0.0
    return float(getattr(one, measure.name))


def modules_of(members: Sequence[Member | Judged]) -> list[str]:
    """Each module once, in the order of the forward pass."""
    return in_flow(experts_as_one(m.place.module) for m in members)


def in_order(series: Iterable[str]) -> list[str]:
    """Each series once: forward products first, tensors by their names, gradients last."""

    def rank(name: str) -> tuple[int, bool, str]:
        product = name.rpartition(".")[0]
        known = _PRODUCTS.index(product) if product in _PRODUCTS else len(_PRODUCTS)
        return (known, "grad" in name, name)

    return sorted(set(series), key=rank)


def by_key(
    members: Iterable[Member], key: Callable[[Member], int]
) -> dict[str, dict[int, list[float]]]:
    """Series -> layer, iteration or rank -> numbers."""
    grouped: dict[str, dict[int, list[float]]] = {}
    for member in members:
        grouped.setdefault(member.series, {}).setdefault(key(member), []).append(member.value)
    return grouped


def slug(words: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", words).strip("-")
