"""Pairs the runs of each scheme with those they are held against, and says which runs a verdict leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantexp.analysis.compare.baseline import closest, unfit
from quantexp.analysis.compare.comparison import Row
from quantexp.analysis.compare.gap import gap_to
from quantexp.analysis.compare.lines import scheme_label
from quantexp.analysis.compare.matched import Mismatch, why_left_out
from quantexp.analysis.compare.side import BASELINE
from quantexp.errors import RunError

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
