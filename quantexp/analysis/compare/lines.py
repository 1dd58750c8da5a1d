"""The lines of a comparison: one for each scheme, with a band over runs that differ only in the seed.

A line is the mean of its runs over the iterations that all of them have, the band reaches from the least to the
largest; of one run the three are the same. A gap is paired by seed before anything is averaged. Runs that no verdict
can use, because they diverged, failed or have no bf16 run of their seed, are left out where a scheme has others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from quantexp.analysis.compare.comparison import Comparison, Row
from quantexp.analysis.compare.labels import CHAOS, SEED, is_of_no_matter, without_seed
from quantexp.analysis.compare.leaves import differing
from quantexp.analysis.compare.matched import why_left_out
from quantexp.analysis.scheme_style import BASELINE, SchemeStyle, scheme_styles


@dataclass(frozen=True)
class Band:
    """Values by iteration."""

    iterations: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


NOTHING = Band()


@dataclass(frozen=True)
class Line:
    """One scheme in the figure."""

    #: `linear_mxfp4`, `linear_mxfp4, 3 seeds`.
    label: str
    style: SchemeStyle
    #: Indices of the comparison's rows.
    rows: tuple[int, ...]
    is_baseline: bool
    #: Perturbed bf16 runs, whose gap is chance.
    is_perturbed: bool
    losses: Band
    #: Empty for a baseline.
    gaps: Band


def lines_of(comparison: Comparison) -> list[Line]:
    """Each scheme of a comparison once, in the order of its first row; all perturbed runs of bf16 are one."""
    rows = comparison.rows
    groups = groups_of(rows)
    styles = scheme_styles([_drawn_as(rows[group[0]]) for group in groups])
    return [_line(rows, group, style) for group, style in zip(groups, styles, strict=True)]


def band_of(curves: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Band:
    """The concatenated iterations and values of several runs."""
    by_iteration = [dict(zip(*curve, strict=True)) for curve in curves]
    if not by_iteration:
        return NOTHING
    common = [i for i in by_iteration[0] if all(i in one for one in by_iteration)]
    values = [[one[i] for one in by_iteration] for i in common]
    return Band(
        tuple(common),
        tuple(map(min, values)),
        tuple(map(fmean, values)),
        tuple(map(max, values)),
    )


def groups_of(rows: Sequence[Row]) -> list[list[int]]:
    """Groups of indices of rows that differ only in the seed, once each but for copies, or in what perturbed them."""
    groups: list[list[int]] = []
    for i, row in enumerate(rows):
        for group in groups:
            seeds = {rows[j].side.seed for j in group}
            is_new = row.is_perturbed or row.side.seed not in seeds or row.same_as is not None
            if is_new and _is_repetition(row, rows[group[0]]):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _is_repetition(row: Row, first: Row) -> bool:
    if row.side.scheme != first.side.scheme or None in (row.side.seed, first.side.seed):
        return False
    if row.side.codes != first.side.codes:
        return False
    chance = (SEED, CHAOS) if row.is_perturbed and first.is_perturbed else (SEED,)
    return all(
        difference.key in chance or is_of_no_matter(difference.key)
        for difference in differing(row.side.config, first.side.config)
    )


def is_usable(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a mean over the seeds of its scheme uses the run."""
    if row.same_as:
        return False
    if row.is_baseline or row.lacks:
        return row.side.broke_off is None
    baseline = rows[row.baseline]
    why = why_left_out(row.side, baseline.side, row.mismatches, BASELINE)
    return why is None and not baseline.same_as


def scheme_label(row: Row) -> str:
    """The label of a row without its seed."""
    return without_seed(row.label, row.side)


def _drawn_as(row: Row) -> str:
    return BASELINE if row.side.quantises_nothing else row.side.scheme


def _line(rows: Sequence[Row], group: Sequence[int], style: SchemeStyle) -> Line:
    everyone = [rows[i] for i in group]
    counted = [row for row in everyone if is_usable(row, rows)]
    counted = counted or [row for row in everyone if not row.side.is_void]
    members = counted or everyone
    first = everyone[0]
    is_baseline = first.is_baseline
    label, count = first.label, f"{len(counted)} of " * (counted != everyone) + f"{len(everyone)}"
    if first.is_perturbed:
        label = f"{scheme_label(first)}, weights perturbed, {count} run{'s' * (len(everyone) > 1)}"
    elif len(everyone) > 1:
        label = f"{scheme_label(first)}, {count} seeds"
    losses = [(m.side.losses.iterations, m.side.losses.losses) for m in members]
    gaps = [(m.gap.iterations, m.gap.gaps) for m in members if m.gap is not None]
    return Line(
        label,
        style,
        tuple(group),
        is_baseline,
        first.is_perturbed,
        band_of([curve for curve in losses if curve[0]]),
        NOTHING if is_baseline else band_of(gaps),
    )
