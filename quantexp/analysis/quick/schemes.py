"""Runs as the schemes they train: a scheme's losses and gaps, and what it leaves of each kind of tensor.

Runs that differ by their seed alone are one scheme (`quantexp.analysis.compare.lines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantexp.analysis.chapter import Source
from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.lines import NOTHING, Band, Line, lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import judge
from quantexp.analysis.quick.by_kind import OfKind, by_kind
from quantexp.analysis.quick.first_look import FirstLook, Look
from quantexp.analysis.scheme_style import SchemeStyle, scheme_styles


@dataclass(frozen=True)
class Scheme:
    """One line and one row."""

    label: str
    style: SchemeStyle
    kinds: tuple[OfKind, ...]
    losses: Band = NOTHING
    gaps: Band = NOTHING
    is_baseline: bool = False


def schemes_of(
    sources: Sequence[Source], looks: Sequence[FirstLook]
) -> tuple[list[Scheme], list[str]]:
    """The schemes of the sources, runs first, then bare folders; and notes about their gaps."""
    runs = [i for i, source in enumerate(sources) if source.run is not None]
    bare = [i for i, source in enumerate(sources) if source.run is None]
    lines: list[Line] = []
    notes: list[str] = []
    if runs:
        sides = [read_side(run) for i in runs if (run := sources[i].run) is not None]
        comparison = compare(sides)
        lines = lines_of(comparison)
        notes.append(judge(comparison).noise)
        unmatched = [row.label for row in comparison.rows if not row.matched]
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            notes.append(
                f"no matched pair with the baseline, see quantexp compare: {', '.join(unmatched[:3])}{more}"
            )
    drawn = [
        Scheme(
            line.label,
            line.style,
            tuple(_declared(*(looks[runs[row]] for row in line.rows))),
            line.losses,
            line.gaps,
            line.is_baseline,
        )
        for line in lines
    ]
    styles = scheme_styles([sources[i].scheme for i in bare])
    for i, style in zip(bare, styles, strict=True):
        drawn.append(Scheme(sources[i].label, style, tuple(_declared(looks[i]))))
    return drawn, notes


def _declared(*looks: FirstLook) -> list[OfKind]:
    """The kinds of tensor with only the quantised operands of the run, in their declared formats.

    Of statistics, what `capture.format` judged in another format says nothing of the scheme.
    """
    tensors = [look for one in looks for look in one.tensors]
    if not any(look.scales for look in tensors):
        return []
    return by_kind(FirstLook(tuple(map(_with_declared, tensors))))


def _with_declared(look: Look) -> Look:
    operands = (o for o in look.measured.operands if o.declared or o.format in look.scales)
    return replace(look, measured=replace(look.measured, operands=tuple(operands)))
