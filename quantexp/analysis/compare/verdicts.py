"""Whether each scheme's gap can be told from noise: its mean over seeds, the interval of it, and one verdict in words.

Losses of neighbouring iterations are correlated, so their spread says nothing of the error of their mean. Each seed
therefore gives one number: the mean, over a window of the last iterations, of the difference to the matched run of the
same seed. Those numbers are independent of each other. Two floors stand beside the gap:

    chaos   what bf16 has to itself if its initial weights differ in last bits (`training.chaos`)
    seed    what two bf16 runs of unlike seeds differ by

Each is the difference of two runs that chance alone exceeds once in twenty times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from quantexp.analysis.compare.arguments import HOW_TO_RECORD
from quantexp.analysis.compare.comparison import Comparison, Row
from quantexp.analysis.compare.gap import LATE_SHARE, gap_to
from quantexp.analysis.compare.lines import groups_of, is_usable, scheme_label
from quantexp.analysis.compare.noise import (
    FEWEST,
    LEVEL,
    floor_of,
    holm,
    interval,
    mean_p_value,
    seeds_needed,
    sign_flip_p_value,
    t_quantile,
)
from quantexp.analysis.compare.pairs import LeftOut, Pair, Paired, paired
from quantexp.analysis.compare.side import BASELINE
from quantexp.errors import RunError
from quantexp.runs.metrics import LossCurve


@dataclass(frozen=True)
class Verdict:
    """Of one scheme; differences in the unit of the measure, one for each seed."""

    label: str
    against: str
    seeds: tuple[int, ...]
    gaps: tuple[float, ...]
    #: The first and the last iteration of the window.
    window: tuple[int, int]
    mean: float
    #: The mean in parts of that of the runs it is held against.
    relative: float | None
    #: The 95% interval of the mean, and p-values of a mean of zero; None with fewer than three seeds.
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    p_holm: float | None = None
    #: None if the number of seeds does not allow it.
    p_sign_flip: float | None = None
    seeds_needed: int | None = None
    words: str = ""
    #: The runs of its other seeds, each with the reason.
    left_out: tuple[LeftOut, ...] = ()

    @property
    def full_words(self) -> str:
        """The verdict, with the number of seeds that it leaves out and why."""
        return "; ".join(
            filter(None, (self.words, _left_out_words(self.left_out, len(self.seeds))))
        )


@dataclass(frozen=True)
class Unjudged:
    """A scheme of which no seed can be used."""

    label: str
    left_out: tuple[LeftOut, ...]

    @property
    def full_words(self) -> str:
        """The reason in place of a verdict."""
        return f"no seed to judge: {_left_out_words(self.left_out, 0)}"


def _left_out_words(left_out: Sequence[LeftOut], num_used: int) -> str:
    """`1 of 4 seeds left out (not finite)`; empty if none is."""
    if not left_out:
        return ""
    number = num_used + len(left_out)
    whys = ", ".join(dict.fromkeys(one.why for one in left_out))
    return f"{len(left_out)} of {number} seed{'s' * (number > 1)} left out ({whys})"


@dataclass(frozen=True)
class Floors:
    """What chance does to the bf16 runs that differ in the seed alone."""

    label: str
    chaos: float | None
    #: Pairs of a perturbed run and its seed's.
    num_chaos: int
    seed: float | None
    num_seeds: int


@dataclass(frozen=True)
class Verdicts:
    """Of all schemes."""

    measure: str
    schemes: tuple[Verdict, ...]
    #: Of each group of bf16 runs that a scheme is matched with; several if they differ in more than the seed.
    floors: tuple[Floors, ...]
    against: str = BASELINE
    unjudged: tuple[Unjudged, ...] = ()
    #: The largest number of seeds of a scheme, with or without matched pairs.
    num_seeds: int = 1

    @property
    def window(self) -> str:
        """The iterations whose mean the gaps are, in words."""
        windows = {verdict.window for verdict in self.schemes}
        if len(windows) != 1:
            return "the last iterations of each run"
        return "".join(f"iterations {first} to {last}" for first, last in windows)

    @property
    def noise(self) -> str:
        """Whether there are enough seeds to distinguish gaps from noise."""
        most = max((len(verdict.seeds) for verdict in self.schemes), default=0)
        if most > 1:
            own = f"the {self.against} run of its own seed"
            return f"{most} seeds, each paired with {own}: a gap within their spread is noise"
        if self.num_seeds > 1:
            why = f"{self.num_seeds} seeds, but no scheme has two matched pairs"
        else:
            why = "one seed for each scheme"
        return f"{why}: no gap can be told from noise, whatever its size"

    @property
    def has_seeds(self) -> bool:
        """Whether a scheme has several seeds, without which nothing can be said."""
        numbers = [len(verdict.seeds) + len(verdict.left_out) for verdict in self.schemes]
        return max([*numbers, *(len(scheme.left_out) for scheme in self.unjudged)], default=0) > 1


def judge(
    comparison: Comparison, window: int | None = None, against: str | None = None
) -> Verdicts:
    """The verdict on each scheme, in the order of its first row.

    Args:
        comparison: its sides have the measure in `measured`.
        window: the number of last iterations; None for a tenth of them.
        against: the scheme that the others are held against; None for the bf16 run of each.

    Raises:
        RunError: no run has the scheme `against`, or none has recorded the measure.
    """
    rows = comparison.rows
    measure = rows[0].side.measure
    if measure != "loss" and not any(row.side.measured.iterations for row in rows):
        raise RunError(f"measure={measure}: no run has recorded it; {HOW_TO_RECORD[measure]}")
    groups = [[rows[i] for i in group] for group in groups_of(rows)]
    schemes = paired(rows, groups, against)
    usable = [scheme for scheme in schemes if scheme.pairs]
    drafts = [_draft(scheme, window, against or BASELINE) for scheme in usable]
    baselines = [group for group in groups if group[0].is_baseline]
    judged = [group for group in groups if not group[0].side.quantises_nothing]
    floors = [_floors(group, rows, window) for group in baselines]
    chaos: dict[Path | None, float | None] = {
        row.side.run.root: floor.chaos
        for group, floor in zip(baselines, floors, strict=True)
        for row in group
    }
    roots = [_baseline_root(scheme.pairs, rows) for scheme in usable]
    used = zip(baselines, floors, strict=True)
    shown = [floor for group, floor in used if any(row.side.run.root in roots for row in group)]
    return Verdicts(
        measure,
        conclude(drafts, [chaos.get(root) for root in roots]),
        tuple(shown),
        against or BASELINE,
        tuple(Unjudged(each.label, each.left_out) for each in schemes if not each.pairs),
        max(len({row.side.seed for row in group}) for group in judged or groups),
    )


def _baseline_root(pairs: Sequence[Pair], rows: Sequence[Row]) -> Path | None:
    """The folder of a bf16 run that a scheme's runs are matched with; None if there is none."""
    return next((rows[row.baseline].side.run.root for row, _ in pairs if row.matched), None)


def _floors(group: Sequence[Row], rows: Sequence[Row], window: int | None) -> Floors:
    whole = [row for row in group if is_usable(row, rows)] or group
    own = {row.side.run.root: row for row in whole if row.side.measured.iterations}
    pairs = [
        (row, own[rows[row.baseline].side.run.root])
        for row in rows
        if row.is_perturbed and row.matched and rows[row.baseline].side.run.root in own
        if is_usable(row, rows) and row.side.measured.iterations
    ]
    differences = [_difference(pair, _span([pair], window)) for pair in pairs]
    levels = [_level(row.side.measured, _span([(row, row)], window)) for row in own.values()]
    many = len(levels) > 1
    return Floors(
        scheme_label(group[0]),
        floor_of(differences),
        len(differences),
        t_quantile(len(levels) - 1) * math.sqrt(2) * stdev(levels) if many else None,
        len(levels),
    )


def _span(pairs: Sequence[Pair], window: int | None) -> tuple[int, int]:
    """The window that all pairs have."""
    last = min(row.side.measured.iterations[-1] for pair in pairs for row in pair)
    length = max(1, round(LATE_SHARE * last)) if window is None else window
    return max(1, last - length + 1), last


def _difference(pair: Pair, span: tuple[int, int]) -> float:
    """The mean difference of a pair over the window; of a rare measure at the last iteration before its end."""
    row, other = pair
    gap = gap_to(row.side.measured, other.side.measured)
    return math.nan if gap is None else _level(LossCurve(gap.iterations, gap.gaps), span)


def _level(curve: LossCurve, span: tuple[int, int]) -> float:
    first, last = span
    values = [x for i, x in zip(curve.iterations, curve.losses, strict=True) if i <= last]
    late = [x for i, x in zip(curve.iterations, curve.losses, strict=True) if first <= i <= last]
    return fmean(late or values[-1:] or [math.nan])


def _draft(scheme: Paired, window: int | None, against: str) -> Verdict:
    pairs = scheme.pairs
    span = _span(pairs, window)
    gaps = {row.side.seed or 0: _difference((row, other), span) for row, other in pairs}
    level = fmean(_level(other.side.measured, span) for _, other in pairs)
    verdict = verdict_on(scheme.label, against, gaps, level, span)
    return replace(verdict, left_out=scheme.left_out)


def verdict_on(
    label: str,
    against: str,
    gap_by_seed: Mapping[int, float],
    level: float,
    window: tuple[int, int],
) -> Verdict:
    """The verdict on one scheme, without what depends on the others; `level` is what it is held against."""
    gaps = tuple(gap_by_seed.values())
    mean = fmean(gaps)
    relative = mean / level if level else None
    draft = Verdict(label, against, tuple(gap_by_seed), gaps, window, mean, relative)
    if len(gaps) < FEWEST or not all(map(math.isfinite, gaps)):
        return draft
    return replace(
        draft,
        interval=interval(gaps),
        p_value=mean_p_value(gaps),
        p_sign_flip=sign_flip_p_value(gaps),
        seeds_needed=seeds_needed(mean, stdev(gaps)),
    )


def conclude(
    drafts: Sequence[Verdict], chaos_floors: Sequence[float | None]
) -> tuple[Verdict, ...]:
    """The verdicts with p-values corrected for their number, and in words; each beside its chaos floor."""
    corrected = iter(holm([draft.p_value for draft in drafts if draft.p_value is not None]))
    whole = [
        draft if draft.p_value is None else replace(draft, p_holm=next(corrected))
        for draft in drafts
    ]
    return tuple(
        replace(draft, words=_words(draft, floor))
        for draft, floor in zip(whole, chaos_floors, strict=True)
    )


def _words(draft: Verdict, chaos_floor: float | None) -> str:
    if draft.interval is None or draft.p_holm is None:
        return f"cannot be told (needs {FEWEST} seeds or more)"
    if draft.p_holm < LEVEL:
        return f"{'above' if draft.mean > 0 else 'below'} {draft.against}"
    if chaos_floor is not None and max(map(abs, draft.interval)) <= chaos_floor:
        return "inside the chaos floor"
    if draft.seeds_needed is None:
        return "cannot be told (would need more than 1000 seeds)"
    if draft.seeds_needed <= len(draft.gaps):
        return "cannot be told beside so many schemes (would need more seeds)"
    return f"cannot be told (would need about {draft.seeds_needed} seeds)"
