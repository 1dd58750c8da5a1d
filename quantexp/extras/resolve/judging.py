"""One verdict for each scheme and horizon: above, below, equivalent within a margin, or cannot be told.

A unit is a checkpoint of a seed's run: its branches share weights, data and held-out text, so that their differences
are paired. Units of one seed have a past in common, and are no independent measurements: each seed gives one number,
the mean over its units, and Student's t is over seeds. In this order:

    above, below     the p-value, corrected for all schemes and horizons of the table (Holm), is below 5%, and the
                     seeds show by themselves that no odd shape of noise explains it (`noise.is_sound`)
    equivalent       two one-sided tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987) exclude
                     a mean at or beyond the margin on either side, corrected in the same way
    cannot be told   otherwise

With fewer than six seeds nothing is told: so few values do not show the shape of their noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, stdev

from quantexp.analysis.compare.noise import (
    FEWEST,
    FEWEST_ALONE,
    LEVEL,
    MOST_SEEDS,
    holm,
    interval,
    is_sound,
    mean_p_value,
    seeds_for_skewness,
    seeds_needed,
    t_p_value,
)
from quantexp.extras.resolve.looks import level
from quantexp.extras.resolve.power import smallest_gap


class Verdict(Enum):
    """What can be said of a difference."""

    ABOVE = "above"
    BELOW = "below"
    EQUIVALENT = "equivalent"
    CANNOT_BE_TOLD = "cannot be told"


@dataclass(frozen=True)
class Judgement:
    """Of one scheme at one horizon; differences of the held-out loss in nats a token, or of a measure of gradients."""

    scheme: str
    #: 0 for gradients.
    steps: int
    #: Seed -> the mean difference of its units.
    gaps: Mapping[int, float]
    num_units: int
    #: Of the mean over seeds; None with fewer than `FEWEST` seeds, or if a difference is not finite.
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    p_equivalent: float | None = None
    #: Both corrected for all schemes and horizons, and for the looks of a plan.
    p_holm: float | None = None
    p_equivalent_holm: float | None = None
    verdict: Verdict = Verdict.CANNOT_BE_TOLD
    #: Why it cannot be told, or what else is to say; may be empty.
    note: str = ""
    #: About how many more seeds would tell, if mean, spread and shape stay; None if unknown, or none would.
    more_seeds: int | None = None

    @property
    def mean(self) -> float | None:
        """Over seeds; None if a difference is not finite."""
        return fmean(self.gaps.values()) if self.is_finite else None

    @property
    def is_finite(self) -> bool:
        """Whether there are differences, and all are finite."""
        return bool(self.gaps) and all(map(math.isfinite, self.gaps.values()))

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None with fewer than two."""
        return stdev(self.gaps.values()) if self.is_finite and len(self.gaps) > 1 else None

    @property
    def smallest_gap(self) -> float | None:
        """The gap that so many seeds of this spread detect; None with fewer than two."""
        deviation = self.deviation
        return None if deviation is None else smallest_gap(deviation, len(self.gaps))


def judged(
    drafts: Sequence[Judgement], margin: float, looks: Sequence[int] = ()
) -> list[Judgement]:
    """The drafts of one table with their verdicts; a draft has scheme, steps, gaps and number of units.

    `looks` are the numbers of seeds at which it may be judged (`looks.level`); none means once.
    """
    measured = [_measured(draft, margin) for draft in drafts]
    places = [i for i, each in enumerate(measured) if each.p_value is not None]
    p_values = holm([measured[i].p_value or 0.0 for i in places])
    equivalent = holm([measured[i].p_equivalent or 0.0 for i in places])
    for i, *both in zip(places, p_values, equivalent, strict=True):
        own = level(looks, len(measured[i].gaps))
        factor = math.inf if own is None else LEVEL / own
        p, q = (min(1.0, value * factor) if value else 0.0 for value in both)
        measured[i] = replace(measured[i], p_holm=p, p_equivalent_holm=q)
    return [_at_look(_concluded(each, margin), looks) for each in measured]


def _at_look(each: Judgement, looks: Sequence[int]) -> Judgement:
    """The judgement as it is at a look, and nothing between two looks or after the last one."""
    number = len(each.gaps)
    if not each.is_finite or level(looks, number) is not None:
        return each
    following = next((n for n in looks if n > number), None)
    words = f"the plan has no look at {number} seeds"
    more = None if following is None else following - number
    return replace(each, verdict=Verdict.CANNOT_BE_TOLD, note=words, more_seeds=more)


def _measured(draft: Judgement, margin: float) -> Judgement:
    values = list(draft.gaps.values())
    if not draft.is_finite or len(values) < FEWEST:
        return draft
    return replace(
        draft,
        interval=interval(values),
        p_value=mean_p_value(values),
        p_equivalent=equivalence_p_value(values, margin),
    )


def equivalence_p_value(values: Sequence[float], margin: float) -> float:
    """The larger p-value of two one-sided t-tests, of a mean of at most -margin and of at least margin."""
    mean, error = fmean(values), stdev(values) / math.sqrt(len(values))
    nearest = margin - abs(mean)
    if error == 0:
        return float(nearest <= 0)
    two_sided = t_p_value(abs(nearest) / error, len(values) - 1)
    return two_sided / 2 if nearest > 0 else 1 - two_sided / 2


def _concluded(each: Judgement, margin: float) -> Judgement:
    values = list(each.gaps.values())
    if not each.is_finite:
        return replace(each, note="not finite" if values else "no unit")
    if len(values) < FEWEST_ALONE:
        return replace(each, more_seeds=_more(values, margin) or FEWEST_ALONE - len(values))
    assert each.p_holm is not None
    assert each.p_equivalent_holm is not None
    is_within = each.p_equivalent_holm < LEVEL
    if each.p_holm < LEVEL and is_sound(values, each.p_holm):
        verdict = Verdict.ABOVE if fmean(values) > 0 else Verdict.BELOW
        return replace(each, verdict=verdict, note="within the margin" if is_within else "")
    if is_within:
        return replace(each, verdict=Verdict.EQUIVALENT)
    if each.p_holm < LEVEL:
        enough = seeds_for_skewness(values)
        more = None if enough is None else max(1, enough - len(values))
        return replace(each, note="skewed gaps", more_seeds=more)
    if each.p_value is not None and each.p_value < LEVEL:
        return replace(each, note="clear alone, not among all")
    return replace(each, more_seeds=_more(values, margin))


def _more(values: Sequence[float], margin: float) -> int | None:
    """How many more seeds would tell a difference or equivalence, at least one; None beyond `MOST_SEEDS` in all."""
    if len(values) < FEWEST:
        return None
    mean, deviation = fmean(values), stdev(values)
    numbers = [seeds_needed(mean, deviation), _seeds_for_equivalence(mean, deviation, margin)]
    known = [number for number in numbers if number is not None]
    return max(1, min(known) - len(values)) if known else None


def _seeds_for_equivalence(mean: float, deviation: float, margin: float) -> int | None:
    """The number of seeds at which both one-sided tests would exclude the margin, if mean and spread stay."""

    def is_told(number: int) -> bool:
        t = nearest / (deviation / math.sqrt(number)) if deviation else math.inf
        return t_p_value(t, number - 1) / 2 < LEVEL

    nearest = margin - abs(mean)
    if nearest <= 0 or not is_told(MOST_SEEDS):
        return None
    numbers = range(FEWEST_ALONE, MOST_SEEDS + 1)
    return numbers[bisect_left(numbers, True, key=is_told)]
