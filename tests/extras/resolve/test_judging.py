"""Verdicts: against scipy's tests, and how often they are false, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from quantexp.extras.resolve.judging import Judgement, Verdict, equivalence_p_value, judged
from quantexp.extras.resolve.looks import level

MARGIN = 1e-3
#: Six seeds, close together.
CLEAR = (0.0030, 0.0031, 0.0029, 0.0032, 0.0028, 0.0030)
Draw = Callable[[tuple[int, ...]], np.ndarray]


def draft(gaps: Sequence[float], scheme: str = "mxfp4", steps: int = 50) -> Judgement:
    return Judgement(scheme, steps, dict(enumerate(gaps, 1)), 2 * len(gaps))


def verdict_of(gaps: Sequence[float], margin: float = MARGIN) -> Judgement:
    (one,) = judged([draft(gaps)], margin)
    return one


@pytest.mark.parametrize("shift", [0.0, 4e-4, 1e-3, -2e-3])
@pytest.mark.parametrize("n", [3, 6, 11])
def test_equivalence_is_two_one_sided_tests_of_scipy(shift: float, n: int) -> None:
    values = shift + 3e-4 * np.random.default_rng(n).normal(size=n)
    above = stats.ttest_1samp(values, -MARGIN, alternative="greater").pvalue
    below = stats.ttest_1samp(values, MARGIN, alternative="less").pvalue
    own = equivalence_p_value(values.tolist(), MARGIN)
    assert own == pytest.approx(max(above, below), rel=1e-9)


def test_the_four_verdicts() -> None:
    assert verdict_of(CLEAR).verdict is Verdict.ABOVE
    assert verdict_of([-gap for gap in CLEAR]).verdict is Verdict.BELOW
    near_zero = [1e-4, -1.2e-4, 0.8e-4, -0.7e-4, 0.4e-4, -0.5e-4]
    assert verdict_of(near_zero).verdict is Verdict.EQUIVALENT
    wide = [3e-3, -2e-3, 1e-3, -2.5e-3, 2e-3, 1e-3]
    cannot = verdict_of(wide)
    assert cannot.verdict is Verdict.CANNOT_BE_TOLD
    assert cannot.more_seeds is not None
    assert cannot.more_seeds > 6


def test_a_difference_within_the_margin_is_both() -> None:
    one = verdict_of(CLEAR, margin=0.01)
    assert (one.verdict, one.note) == (Verdict.ABOVE, "within the margin")


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_fewer_than_six_seeds_tell_nothing_however_clear(number: int) -> None:
    one = verdict_of(CLEAR[:number])
    assert one.verdict is Verdict.CANNOT_BE_TOLD
    assert one.more_seeds == 6 - number


def test_gaps_that_are_skewed_towards_zero_tell_nothing() -> None:
    skewed = (0.0030, 0.0030, 0.0031, 0.0030, 0.0031, 0.0011)
    one = verdict_of(skewed)
    assert one.p_value is not None
    assert one.p_value < 0.05
    assert (one.verdict, one.note) == (Verdict.CANNOT_BE_TOLD, "skewed gaps")
    # Nine of the same mean, spread and skewness would be sound.
    assert one.more_seeds == 3
    mild = [0.0030, 0.0035, 0.0033, 0.0034, 0.0027, 0.0028, 0.0034, 0.0026]
    assert verdict_of(mild).verdict is Verdict.ABOVE


def test_a_difference_of_many_deviations_is_told_whatever_its_skewness() -> None:
    """The errors of MXFP4's gradient are some 30 times those of bf16: logarithms of eight seeds, as recorded."""
    ratios = [3.05, 3.64, 3.61, 3.58, 3.62, 3.27, 3.55, 3.49]
    assert abs(stats.skew(ratios)) > 0.06 * math.sqrt(len(ratios))
    assert verdict_of(ratios).verdict is Verdict.ABOVE


def test_many_comparisons_need_more_than_one() -> None:
    clear_alone = (0.0014, 0.0003, 0.0012, 0.0002, 0.0013, 0.0005)
    others = [draft([1e-3, -1e-3, 2e-3, -2e-3, 1e-3, -1.2e-3], f"s{i}") for i in range(9)]
    assert verdict_of(clear_alone, margin=1e-5).verdict is Verdict.ABOVE
    one, *_ = judged([draft(clear_alone), *others], 1e-5)
    assert one.verdict is Verdict.CANNOT_BE_TOLD
    assert one.note == "clear alone, not among all"


def test_a_difference_that_is_not_finite_is_named() -> None:
    one = verdict_of([*CLEAR, math.nan])
    assert (one.verdict, one.note, one.mean) == (Verdict.CANNOT_BE_TOLD, "not finite", None)
    none = verdict_of([])
    assert (none.verdict, none.note) == (Verdict.CANNOT_BE_TOLD, "no unit")


def test_the_seeds_that_would_tell_do_tell() -> None:
    """If mean and spread stay: values of exactly the same mean and standard deviation, as many as are named."""
    wide = [12e-4, -6e-4, 27e-4, -18e-4, 21e-4, 9e-4]
    one = verdict_of(wide)
    assert one.more_seeds is not None
    number = len(wide) + one.more_seeds
    shape = np.array([(-1.0) ** i for i in range(number)])
    shape = (shape - shape.mean()) / shape.std(ddof=1)
    same = np.mean(wide) + np.std(wide, ddof=1) * shape
    p_value = stats.ttest_1samp(same, 0.0).pvalue
    assert min(p_value, equivalence_p_value(same.tolist(), MARGIN)) < 0.05


def rate(
    trials: int,
    draw: Draw,
    is_alarm: Callable[[Judgement], bool],
    seeds: int = 6,
    margin: float = 1e-9,
) -> float:
    """How often any of two schemes at two horizons, whose gaps depend on each other, has a false verdict."""
    alarms = 0
    for _ in range(trials):
        of_seed = draw((2, seeds))
        gaps = [of_seed[scheme] + 0.3 * draw((seeds,)) for scheme in (0, 1) for _ in (0, 1)]
        drafts = [draft(each.tolist(), f"s{i}") for i, each in enumerate(gaps)]
        alarms += any(map(is_alarm, judged(drafts, margin)))
    return alarms / trials


def is_told(one: Judgement) -> bool:
    return one.verdict in (Verdict.ABOVE, Verdict.BELOW)


SHAPES: dict[str, Callable[[np.random.Generator], Draw]] = {
    "normal": lambda rng: rng.standard_normal,
    "three degrees of freedom": lambda rng: lambda shape: rng.standard_t(3, shape),
    "skewed": lambda rng: lambda shape: rng.exponential(1.0, shape) - 1.0,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scheme_without_an_effect_is_rarely_told(shape: str) -> None:
    """250 trials of a rate of at most 5%: 3 standard errors of it are 4.1 points."""
    draw = SHAPES[shape](np.random.default_rng(1))
    assert rate(250, draw, is_told) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 250)


def test_a_gap_at_the_margin_is_rarely_called_equivalent() -> None:
    rng = np.random.default_rng(2)

    def draw(
        shape: tuple[int, ...],
    ) -> np.ndarray:  # half of the margin, and 0.3 of it: about the margin in all
        return 1 / 1.3 + 0.3 * rng.standard_normal(shape)

    found = rate(250, draw, lambda one: one.verdict is Verdict.EQUIVALENT, margin=1.0)
    assert found <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 250)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seeds", [6, 8, 12])
def test_false_alarms_stay_at_their_rate(shape: str, seeds: int) -> None:
    """2,000 trials: 3 standard errors of 5% are 1.5 points."""
    nominal = 0.05
    draw = SHAPES[shape](np.random.default_rng(3))
    found = rate(2000, draw, is_told, seeds)
    assert found <= nominal + 3 * math.sqrt(nominal * (1 - nominal) / 2000)


def test_the_levels_of_looks_are_those_of_lan_and_demets() -> None:
    """Cumulative levels of the O'Brien-Fleming-type function, two-sided 5%, at a third, two thirds and the end."""
    looks = (8, 16, 24)
    spent = np.cumsum([level(looks, n) for n in looks])
    thirds = [2 * stats.norm.sf(stats.norm.isf(0.025) / math.sqrt(t)) for t in (1 / 3, 2 / 3, 1)]
    assert spent == pytest.approx(thirds, rel=1e-9)
    assert spent[-1] == pytest.approx(0.05)
    assert level(looks, 12) is None
    assert level((), 12) == 0.05


def test_seeds_may_be_added_at_planned_looks_without_more_false_alarms() -> None:
    """2,000 designs without a difference; one that is judged at each look as if it were the only one finds more."""
    random = np.random.default_rng(5)
    looks, alarms = (8, 16, 24), np.zeros(2)
    for _ in range(2000):
        values = random.normal(size=24).tolist()
        for i, plan in enumerate((looks, ())):
            told = (is_told(judged([draft(values[:n])], 1e-9, plan)[0]) for n in looks)
            alarms[i] += any(told)
    planned, unplanned = alarms / 2000
    # Three standard errors of 5% are 1.5%.
    assert planned < 0.05 + 0.015
    assert unplanned > planned + 0.02


def test_nothing_is_told_between_looks_and_at_a_look_a_small_level_decides() -> None:
    (between,) = judged([draft(CLEAR)], MARGIN, (8, 12))
    assert (between.verdict, between.more_seeds) == (Verdict.CANNOT_BE_TOLD, 2)
    assert between.note == "the plan has no look at 6 seeds"
    (after,) = judged([draft(CLEAR * 3)], MARGIN, (8, 12))
    assert (after.verdict, after.more_seeds) == (Verdict.CANNOT_BE_TOLD, None)
    (early,) = judged([draft(CLEAR)], MARGIN, (6, 12))
    assert early.verdict is Verdict.ABOVE
    mild = (0.0014, 0.0003, 0.0012, 0.0002, 0.0013, 0.0005)
    assert verdict_of(mild, 1e-5).verdict is Verdict.ABOVE
    (early,) = judged([draft(mild)], 1e-5, (6, 12))
    assert early.verdict is Verdict.CANNOT_BE_TOLD
