"""Whether each scheme's gap can be told from noise: its mean over seeds, the interval of it, and one verdict in words.

Losses of neighbouring iterations are correlated, so their spread says nothing of the error of their mean. Each seed
therefore gives one number: the mean, over a window of the last iterations, of the difference to the matched run of the
same seed. Those numbers are independent of each other. Two floors stand beside the gap:

    chaos   what bf16 has to itself if its initial weights differ in last bits (`training.chaos`)
    seed    what two bf16 runs of unlike seeds differ by

Each is the difference of two runs that chance alone exceeds once in twenty times. The rule, in this order:

    inside the chaos floor      the whole interval is closer to zero than the chaos floor
    cannot be told              the p-value is not below 5%; or it is, but noise of another shape, or as many schemes
                                as there are, could be the reason
    above, below                otherwise
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from quantexp.analysis.compare.arguments import HOW_TO_RECORD
from quantexp.analysis.compare.comparison import Comparison, Row
from quantexp.analysis.compare.floors import (
    Floors,
    LeftOut,
    Pair,
    Paired,
    floors_of,
    gaps_in,
    level_in,
    paired,
    span_of,
)
from quantexp.analysis.compare.lines import groups_of
from quantexp.analysis.compare.noise import (
    FEWEST,
    FEWEST_ALONE,
    LEVEL,
    holm,
    interval,
    is_clear,
    is_sound,
    mean_p_value,
    seeds_needed,
    sign_flip_p_value,
)
from quantexp.analysis.compare.side import BASELINE
from quantexp.errors import RunError

#: Gaps that differ by less are the same number: subtraction rounds.
_ROUNDING = 1e-9


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
    #: The least number of iterations of the window that a seed has.
    num_iterations: int = 0

    @property
    def full_words(self) -> str:
        """The verdict, with the number of seeds that it leaves out and why."""
        return "; ".join(filter(None, (self.words, self.left_out_words)))

    @property
    def short_words(self) -> str:
        """The verdict without its reason."""
        return self.words.partition(" (")[0]

    @property
    def note(self) -> str:
        """What the short words leave out; may be empty."""
        reason = self.words.removeprefix(self.short_words).strip(" ()")
        return "; ".join(filter(None, (reason, self.left_out_words)))

    @property
    def left_out_words(self) -> str:
        """The number of seeds that it leaves out, and why; may be empty."""
        return _left_out_words(self.left_out, len(self.seeds))


@dataclass(frozen=True)
class Unjudged:
    """A scheme of which no seed can be used."""

    label: str
    left_out: tuple[LeftOut, ...]
    short_words = "no seed to judge"

    @property
    def full_words(self) -> str:
        """The reason in place of a verdict."""
        return f"{self.short_words}: {self.note}"

    @property
    def note(self) -> str:
        """The number of seeds, and why none can be used."""
        return _left_out_words(self.left_out, 0)


def _left_out_words(left_out: Sequence[LeftOut], num_used: int) -> str:
    """`1 of 4 seeds left out (not finite)`; empty if none is."""
    if not left_out:
        return ""
    number = num_used + len(left_out)
    whys = ", ".join(dict.fromkeys(one.why for one in left_out))
    return f"{len(left_out)} of {number} seed{'s' * (number > 1)} left out ({whys})"


@dataclass(frozen=True)
class Verdicts:
    """Of all schemes."""

    measure: str
    schemes: tuple[Verdict, ...]
    #: Of each group of bf16 runs that a scheme is matched with; several if they differ in more than the seed.
    floors: tuple[Floors, ...]
    against: str = BASELINE
    unjudged: tuple[Unjudged, ...] = ()
    #: The largest number of seeds of a scheme, with or without matched pairs; copies of a run count once.
    num_seeds: int = 1

    @property
    def window(self) -> str:
        """The iterations whose mean the gaps are, in words."""
        windows = {verdict.window for verdict in self.schemes}
        if len(windows) != 1:
            return "the last iterations of each run"
        ((first, last),) = windows
        number, least = last - first + 1, min(verdict.num_iterations for verdict in self.schemes)
        some = f" (at least {least} of {number} recorded)" if least < number else ""
        return f"iterations {first} to {last}{some}"

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
    drafts = [_draft(scheme, window, against or BASELINE) for scheme in schemes]
    judged = [(d, s) for d, s in zip(drafts, schemes, strict=True) if isinstance(d, Verdict)]
    baselines = [group for group in groups if group[0].is_baseline]
    quantised = [group for group in groups if not group[0].side.quantises_nothing]
    floors = [floors_of(group, rows, window) for group in baselines]
    by_root: dict[Path | None, Floors] = {
        row.side.run.root: floor
        for group, floor in zip(baselines, floors, strict=True)
        for row in group
    }
    own = [by_root.get(_baseline_root(scheme.pairs, rows)) for _, scheme in judged]
    return Verdicts(
        measure,
        conclude([draft for draft, _ in judged], own),
        tuple(floor for floor in floors if floor in own),
        against or BASELINE,
        tuple(draft for draft in drafts if isinstance(draft, Unjudged)),
        max(len(_seeds(group)) for group in quantised or groups),
    )


def _seeds(group: Sequence[Row]) -> set[int | None]:
    """The seeds of a scheme's runs; copies of one run under several seeds are one."""
    return {row.side.seed for row in group if row.same_as is None}


def _baseline_root(pairs: Sequence[Pair], rows: Sequence[Row]) -> Path | None:
    """The folder of a bf16 run that a scheme's runs are matched with; None if there is none."""
    return next((rows[row.baseline].side.run.root for row, _ in pairs if row.matched), None)


def _draft(scheme: Paired, window: int | None, against: str) -> Verdict | Unjudged:
    if not scheme.pairs:
        return Unjudged(scheme.label, scheme.left_out)
    span = span_of(scheme.pairs, window)
    measured = [(*pair, *gaps_in(pair, span)) for pair in scheme.pairs]
    left_out = [LeftOut(row.side.seed, lack) for row, _, _, lack in measured if lack is not None]
    whole = [(row, other, gaps) for row, other, gaps, lack in measured if lack is None]
    if not whole:
        return Unjudged(scheme.label, (*scheme.left_out, *left_out))
    gap_by_seed = {row.side.seed or 0: fmean(gaps) for row, _, gaps in whole}
    level = fmean(level_in(other, span) for _, other, _ in whole)
    return replace(
        verdict_on(scheme.label, against, gap_by_seed, level, span),
        left_out=(*scheme.left_out, *left_out),
        num_iterations=min(len(gaps) for _, _, gaps in whole),
    )


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
    if len(gaps) < FEWEST or not all(map(math.isfinite, gaps)) or _are_same(gaps):
        return draft
    return replace(
        draft,
        interval=interval(gaps),
        p_value=mean_p_value(gaps),
        p_sign_flip=sign_flip_p_value(gaps),
        seeds_needed=seeds_needed(mean, stdev(gaps)),
    )


def _are_same(gaps: Sequence[float]) -> bool:
    """Whether all gaps are one number other than zero."""
    return max(gaps) - min(gaps) < _ROUNDING < max(map(abs, gaps))


def conclude(drafts: Sequence[Verdict], floors: Sequence[Floors | None]) -> tuple[Verdict, ...]:
    """The verdicts with p-values corrected for their number, and in words; each beside its floors."""
    corrected = iter(holm([draft.p_value for draft in drafts if draft.p_value is not None]))
    whole = [
        draft if draft.p_value is None else replace(draft, p_holm=next(corrected))
        for draft in drafts
    ]
    number = sum(draft.p_holm is not None for draft in whole)
    return tuple(
        replace(draft, words=_words(draft, own, number))
        for draft, own in zip(whole, floors, strict=True)
    )


def _words(draft: Verdict, floors: Floors | None, num_schemes: int) -> str:
    gaps = draft.gaps
    if draft.interval is None or draft.p_value is None or draft.p_holm is None:
        is_one = len(gaps) >= FEWEST and _are_same(gaps)
        reason = "all gaps are the same" if is_one else f"needs {FEWEST} seeds or more"
        return f"cannot be told ({reason})"
    largest = max(map(abs, draft.interval))
    if floors is not None and floors.chaos is not None and largest <= floors.chaos:
        return "inside the chaos floor"
    if largest < _ROUNDING:
        return "no difference (every gap is 0)"
    if draft.p_value >= LEVEL:
        number, limit = draft.seeds_needed, _rounded_up(largest)
        reason = (
            f"would need about {number} seeds"
            if number and round(draft.mean, 4)
            else f"no difference larger than {limit}"
        )
        return f"cannot be told ({reason})"
    noise = None if floors is None else floors.noise
    if not (is_sound(gaps, draft.p_holm) or (noise is not None and is_clear(gaps, *noise))):
        chaos = " or sweep.chaos=1" if floors is None or floors.chaos is None else ""
        needs = f"needs {FEWEST_ALONE} seeds{chaos}"
        return f"cannot be told ({needs if len(gaps) < FEWEST_ALONE else 'skewed gaps'})"
    words = f"{'above' if draft.mean > 0 else 'below'} {draft.against}"
    if draft.p_holm >= LEVEL:
        return f"cannot be told ({words} by itself, but not among {num_schemes} schemes)"
    return words


def _rounded_up(x: float) -> str:
    """`0.00011` for 0.000104: two digits, not below x."""
    digits = 1 - math.floor(math.log10(x))
    return f"{math.ceil(x * 10.0**digits) / 10.0**digits:.{max(0, digits)}f}"
