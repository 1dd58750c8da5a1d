"""Statistics of each kind of tensor in a capture: magnitudes, the range of its format, underflow and saturation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from quantexp.analysis.quick.first_look import FirstLook, Look
from quantexp.analysis.tensors.place import Kind
from quantexp.capture.statistics.counts import Counts, from_json
from quantexp.formats import Family, Format, get_format
from quantexp.formats.codes import values_of

#: HiF8's exponents below this have no mantissa bits: its denormals.
_HIF8_LEAST_NORMAL = 2.0**-15


@dataclass(frozen=True)
class Range:
    """The range of a format's positive values at one scale."""

    least: float
    #: Below this value the spacing is constant.
    least_normal: float
    largest: float
    #: Whether the scale is that of the median block rather than that of the largest element.
    of_median: bool


@dataclass(frozen=True)
class OfKind:
    """One kind of tensor."""

    kind: Kind
    #: Counts of finite non-zero elements by floor(log2 |x|), before quantisation.
    exponents: Counts
    #: The numbers of finite elements, and of zeros.
    num_finite: int
    num_zeros: int
    #: The declared formats, the most frequent first; if the run declares none for any kind, the formats in which its
    #: operands were judged; empty if none is quantised.
    formats: tuple[str, ...]
    #: The range of the most frequent format; None without a format.
    range: Range | None
    #: One value for each operand, if known.
    underflow: tuple[float, ...]
    saturated: tuple[float, ...]
    sqnr_db: tuple[float, ...]


def by_kind(look: FirstLook) -> list[OfKind]:
    """The kinds of tensor in a capture, without block scales, which are codes."""
    result = []
    is_quantised = any(one.scales for one in look.tensors)
    for kind in Kind:
        looks = [one for one in look.tensors if one.kind is kind]
        if looks and kind is not Kind.SCALE:
            result.append(_of_kind(kind, looks, is_quantised=is_quantised))
    return result


def _of_kind(kind: Kind, looks: Sequence[Look], *, is_quantised: bool) -> OfKind:
    before = [o.measured for o in looks if o.measured.place.source == o.measured.place.tensor]
    operands = [operand for look in looks for operand in look.measured.operands]
    names = Counter(_format_of(name) for look in looks for name in look.scales)
    if not is_quantised:
        names = Counter(_format_of(operand.format) for operand in operands)
    formats = tuple(name for name, _ in names.most_common())
    fidelities = [operand.fidelity for operand in operands]
    return OfKind(
        kind,
        sum((from_json(one.log2_magnitude) for one in before), Counts()),
        sum(one.count - one.nonfinite for one in before),
        sum(round(one.zero_share * one.count) for one in before if one.zero_share > 0),
        formats,
        _range(formats[0], looks) if formats else None,
        _known(f.underflow_share for f in fidelities),
        _known(f.saturated_share for f in fidelities),
        _known(f.sqnr_db for f in fidelities),
    )


def _format_of(name: str) -> str:
    """`mxfp4_e2m1` for `mxfp4_e2m1 floor`."""
    return name.split()[0]


def _known(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(value for value in values if not math.isnan(value))


def _range(format_name: str, looks: Sequence[Look]) -> Range | None:
    """The format's range at the scale of the median block, or for the median of the tensors' largest elements."""
    blocks = sum(
        (
            operand.scale_exponents
            for look in looks
            for operand in look.measured.operands
            if _format_of(operand.format) == format_name
        ),
        Counts(),
    )
    exponent = blocks.quantile(0.5)
    of_median = exponent is not None
    if exponent is None:
        of_largest = [
            scale
            for look in looks
            for name, scale in look.scales.items()
            if _format_of(name) == format_name
        ]
        if not of_largest:
            return None
        exponent = round(median(of_largest))
    least, least_normal, largest = (
        2.0**exponent * v for v in representable(get_format(format_name))
    )
    return Range(least, least_normal, largest, of_median)


@cache
def representable(fmt: Format) -> tuple[float, float, float]:
    """The smallest, the smallest normal and the largest positive value of a format's codes."""
    values = [v for v in values_of(fmt) if v > 0]
    is_hif8 = fmt.family is Family.HIF8
    return min(values), _HIF8_LEAST_NORMAL if is_hif8 else 2.0**fmt.element.emin, max(values)
