"""The runs that a verdict pairs, and what chance does to pairs of bf16 runs: the floors that a gap is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from quantexp.analysis.compare.baseline import closest, unfit
from quantexp.analysis.compare.comparison import Row
from quantexp.analysis.compare.gap import gap_to, late_window, values_in
from quantexp.analysis.compare.lines import is_usable, scheme_label
from quantexp.analysis.compare.matched import Mismatch, why_left_out
from quantexp.analysis.compare.noise import floor_of, seed_floor, t_quantile
from quantexp.analysis.compare.side import BASELINE
from quantexp.errors import RunError
from quantexp.runs.metrics import ALWAYS_MEASURED


@dataclass(frozen=True)
class Floors:
    """What chance does to the bf16 runs that differ in the seed alone."""

    label: str
    chaos: float | None
    #: Pairs of a perturbed run and its seed's.
    num_chaos: int
    seed: float | None
    num_seeds: int

    @property
    def noise(self) -> tuple[float, float] | None:
        """The chaos floor, or else that of the seed, and the standard deviation of the differences it is made of."""
        if self.chaos is not None:
            return self.chaos, self.chaos / t_quantile(self.num_chaos)
        return (
            None if self.seed is None else (self.seed, self.seed / t_quantile(self.num_seeds - 1))
        )


def floors_of(group: Sequence[Row], rows: Sequence[Row], window: int | None) -> Floors:
    """What the runs of a group, bf16 but for seed and perturbation, differ by."""
    whole = [row for row in group if is_usable(row, rows)]
    whole = whole or [row for row in group if not (row.side.is_void or row.same_as)]
    own = {row.side.run.root: row for row in whole if row.side.measured.iterations}
    pairs = [
        (row, own[rows[row.baseline].side.run.root])
        for row in rows
        if row.is_perturbed and row.matched and rows[row.baseline].side.run.root in own
        if is_usable(row, rows) and row.side.measured.iterations
    ]
    measured = [gaps_in(pair, span_of([pair], window)) for pair in pairs]
    differences = [fmean(gaps) for gaps, lack in measured if lack is None]
    spans = [(row, span_of([(row, row)], window)) for row in own.values()]
    levels = [level_in(row, span) for row, span in spans if gaps_in((row, row), span)[1] is None]
    return Floors(
        scheme_label(group[0]),
        floor_of(differences),
        len(differences),
        seed_floor(levels),
        len(levels),
    )


def span_of(pairs: Sequence[Pair], window: int | None) -> tuple[int, int]:
    """The window that all pairs have."""
    sides = [row.side for pair in pairs for row in pair]
    first = max(side.losses.iterations[0] if side.losses.iterations else 1 for side in sides)
    return late_window(first, min(side.measured.iterations[-1] for side in sides), window)


def gaps_in(pair: Pair, span: tuple[int, int]) -> tuple[list[float], str | None]:
    """The differences of a pair in the window, and why they are too few; None if they are not.

    Of a measure of every iteration half of the window is needed, of a rare one a single value.
    """
    row, other = pair
    gap = gap_to(row.side.measured, other.side.measured)
    values = values_in(span, gap) if gap is not None else []
    measure, number = row.side.measure, span[1] - span[0] + 1
    if measure in ALWAYS_MEASURED and 2 * len(values) < number:
        return values, f"{number - len(values)} of {number} iterations of the window missing"
    return values, None if values else f"no {measure} in the window"


def level_in(row: Row, span: tuple[int, int]) -> float:
    """The mean of a run over a window, or its last value."""
    return fmean(values_in(span, row.side.measured) or row.side.measured.losses[-1:])


#: A row and the one it is held against.
Pair = tuple[Row, Row]


@dataclass(frozen=True)
class LeftOut:
    """A run that the verdict on its scheme does not use."""

    seed: int | None
    why: str


@dataclass(frozen=True)
class Paired:
    """The runs of one scheme, as far as there are runs of their model and data to be held against."""

    label: str
    pairs: tuple[Pair, ...]
    left_out: tuple[LeftOut, ...]


def paired(
    rows: Sequence[Row], groups: Sequence[Sequence[Row]], against: str | None
) -> list[Paired]:
    """Each group of runs that are held against bf16, or against the scheme `against`.

    Raises:
        RunError: no run has the scheme `against`.
    """
    others = [row for row in rows if row.side.scheme == against and not row.is_perturbed]
    if against is not None and not others:
        schemes = ", ".join(dict.fromkeys(row.side.scheme for row in rows))
        raise RunError(f"against={against}: no run has this scheme; there are {schemes}")
    results = []
    for group in groups:
        pairs, left_out = [], []
        for row in group:
            partner = _baseline(row, rows) if against is None else _partner(row, others)
            if partner is None:
                continue
            why = _why_left_out(row, *partner, against or BASELINE)
            if why is None:
                pairs.append((row, partner[0]))
            else:
                left_out.append(LeftOut(row.side.seed, why))
        if pairs or left_out:
            results.append(Paired(scheme_label(group[0]), tuple(pairs), tuple(left_out)))
    return results


def _baseline(row: Row, rows: Sequence[Row]) -> tuple[Row, Sequence[Mismatch]] | None:
    if row.is_baseline or row.is_perturbed or row.lacks:
        return None
    return rows[row.baseline], row.mismatches


def _partner(row: Row, others: Sequence[Row]) -> tuple[Row, Sequence[Mismatch]] | None:
    fit = [other for other in others if unfit(row.side, other.side) is None]
    if row.is_perturbed or row in others or not fit:
        return None
    place, mismatches = closest(row.side, [other.side for other in fit])
    return fit[place], mismatches


def _why_left_out(row: Row, other: Row, mismatches: Sequence[Mismatch], against: str) -> str | None:
    why = why_left_out(row.side, other.side, mismatches, against)
    if why is not None:
        return why
    if row.same_as is not None:
        return f"the same run as {row.same_as}"
    if other.same_as is not None:
        return f"{other.label} is the same run as {other.same_as}"
    return None if gap_to(row.side.measured, other.side.measured) else f"no {row.side.measure}"
