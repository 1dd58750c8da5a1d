"""Verdicts over seeds: what is paired, what is corrected, and that noise is called so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import yaml

from quantexp.analysis.compare.floors import Floors, LeftOut
from quantexp.analysis.compare.noise import floor_of, t_quantile
from quantexp.analysis.compare.verdicts import (
    conclude,
    judge,
    verdict_on,
)
from quantexp.errors import RunError
from quantexp.runs.paths import RunDir

from .runs import Runs
from .seeds import CHAOS, SEEDS, compared, curve, design, verdict_of


def test_each_seed_gives_the_mean_difference_over_the_window(runs: Runs) -> None:
    verdicts = judge(compared(design(runs, {"FA_mxfp8": [0.1, 0.2, 0.3]})))
    assert verdicts.window == "iterations 19 to 20"
    verdict = verdict_of(verdicts, "FA_mxfp8")
    assert verdict.seeds == (1, 2, 3)
    assert verdict.gaps == pytest.approx((0.1, 0.2, 0.3))
    assert verdict.mean == pytest.approx(0.2)
    assert verdict.relative == pytest.approx(0.2 / 5), (
        "the bf16 runs of its seeds end at 4, 5 and 6"
    )
    assert verdict.interval == pytest.approx((0.2 - 0.24841, 0.2 + 0.24841), abs=1e-5)
    assert verdict.words == "cannot be told (would need about 6 seeds)"


def test_a_clear_gap_is_above_or_below_and_a_window_may_be_chosen(runs: Runs) -> None:
    gaps = {"FA_mxfp8": [0.1, 0.11, 0.12], "linear_mxfp4": [-0.1, -0.11, -0.12]}
    comparison = compared(design(runs, gaps, CHAOS))
    verdicts = judge(comparison)
    assert verdict_of(verdicts, "FA_mxfp8").words == "above bf16"
    assert verdict_of(verdicts, "linear_mxfp4").words == "below bf16"
    early = judge(comparison, window=20)
    assert early.window == "iterations 1 to 20"
    assert verdict_of(early, "FA_mxfp8").mean == pytest.approx(0.011)


def test_several_schemes_are_corrected_for_their_number(runs: Runs) -> None:
    """Differences of 0.1, 0.12 and 0.15 have p = 0.014: enough alone, and not among four schemes."""
    gap, noise = [0.1, 0.12, 0.15], [0.1, -0.1, 0.02]
    chaos = [0.013, -0.013]
    alone = judge(compared(design(runs, {"FA_mxfp8": gap}, chaos)))
    verdict = verdict_of(alone, "FA_mxfp8")
    assert verdict.p_holm == verdict.p_value == pytest.approx(0.0136, abs=1e-4)
    assert verdict.words == "above bf16"
    runs.root = runs.root / "more"
    others = {f"linear_mxfp{i}": noise for i in (4, 6, 8)}
    among = judge(compared(design(runs, {"FA_mxfp8": gap, **others}, chaos)))
    verdict = verdict_of(among, "FA_mxfp8")
    assert verdict.p_holm == pytest.approx(4 * 0.0136, abs=4e-4)
    assert verdict.words == "cannot be told (above bf16 by itself, but not among 4 schemes)"


def test_fewer_than_three_seeds_cannot_be_told(runs: Runs) -> None:
    verdict = verdict_of(judge(compared(design(runs, {"FA_mxfp8": [1.0, 1.0]}))), "FA_mxfp8")
    assert verdict.interval is None
    assert verdict.words == "cannot be told (needs 3 seeds or more)"


def test_floors_are_those_of_perturbed_runs_and_of_seeds(runs: Runs) -> None:
    """Chaos: t of two degrees of freedom is 4.30265; seeds: bf16 ends at 4 to 7, t of three is 3.18245."""
    folders = design(runs, {"FA_mxfp8": [0.01, -0.01, 0.002]}, chaos=[0.03, -0.04])
    comparison = compared(folders)
    assert comparison.warnings == (), "a perturbed run is no pair that went wrong"
    verdicts = judge(comparison)
    (floors,) = verdicts.floors
    assert (floors.label, floors.num_chaos, floors.num_seeds) == ("bf16", 2, 4)
    assert floors.chaos == pytest.approx(4.30265 * math.sqrt(0.0025 / 2), rel=1e-5)
    assert floors.seed == pytest.approx(3.18245 * math.sqrt(2) * 1.290994, rel=1e-5)
    assert verdict_of(verdicts, "FA_mxfp8").words == "inside the chaos floor"
    assert [each.label for each in verdicts.schemes] == ["FA_mxfp8"]


def test_runs_of_other_data_have_floors_of_their_own(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.01, -0.01, 0.002]}, chaos=[0.03, -0.04])
    more: dict[str, Any] = {"iterations": 20, "lr": 1.0}
    folders += [runs.add("bf16", curve(3.0 + seed / 100), seed=seed, **more) for seed in SEEDS]
    folders += [
        runs.add("FA_mxfp8", curve(3.0 + seed / 100 + gap), seed=seed, **more)
        for seed, gap in zip(SEEDS, [0.01, -0.01, 0.002], strict=False)
    ]
    verdicts = judge(compared(folders))
    first, second = verdicts.floors
    assert first.num_chaos == 2
    assert (second.num_chaos, second.chaos) == (0, None)
    assert second.seed is not None
    assert first.seed is not None
    assert second.seed < first.seed / 50
    words = [each.words for each in verdicts.schemes]
    assert words[0] == "inside the chaos floor"
    assert words[1] == "cannot be told (no difference larger than 0.026)", "it has no chaos floor"


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ([1.0, -1.0, 0.001], "cannot be told (no difference larger than 2.5)"),
        ([1e-4, -1e-4, 1e-5], "cannot be told (no difference larger than 0.00026)"),
        # Some eight seeds would tell a gap that is shown as 0.0000.
        ([5e-5, -1e-5, 6e-5], "cannot be told (no difference larger than 0.00013)"),
        ([0.0, 0.0, 0.0], "no difference (every gap is 0)"),
    ],
)
def test_where_no_number_of_seeds_would_tell_the_largest_difference_is_named(
    runs: Runs, gaps: list[float], words: str
) -> None:
    verdicts = judge(compared(design(runs, {"FA_mxfp8": gaps})))
    assert verdict_of(verdicts, "FA_mxfp8").full_words == words


def test_two_schemes_are_held_against_each_other_seed_by_seed(runs: Runs) -> None:
    gaps = {"FA_mxfp8": [0.5, 0.1, 0.3], "linear_mxfp4": [0.61, 0.2, 0.42]}
    verdicts = judge(compared(design(runs, gaps, CHAOS)), against="FA_mxfp8")
    verdict = verdict_of(verdicts, "linear_mxfp4")
    assert verdict.gaps == pytest.approx((0.11, 0.1, 0.12))
    assert verdict.words == "above FA_mxfp8"
    assert verdict_of(verdicts, "bf16").words.startswith("cannot be told")
    with pytest.raises(RunError) as error:
        judge(compared(design(runs, {})), against="FA_mxfp4")
    assert str(error.value) == "against=FA_mxfp4: no run has this scheme; there are bf16"


def test_the_floors_of_an_unrelated_model_have_no_part_in_a_verdict(runs: Runs) -> None:
    """In either order: bf16 of other data has a wide chaos floor, and neither scheme has a bf16 run of its own."""
    unrelated: dict[str, Any] = {"iterations": 20, "data": "sample-2"}
    folders = [runs.add("bf16", curve(4), seed=1, **unrelated)]
    folders.append(runs.add("bf16", curve(9), seed=1, chaos=1, **unrelated))
    for run in folders:
        config = yaml.safe_load(run.config.read_text())
        config["dataset"]["label"] = "other"
        run.config.write_text(yaml.safe_dump(config))
    for scheme, gaps in {"FA_mxfp8": [0.0, 0.0, 0.0], "linear_mxfp4": [0.1, -0.1, 0.02]}.items():
        for seed, gap in enumerate(gaps, 1):
            folders.append(runs.add(scheme, curve(3 + gap), seed=seed, iterations=20))
    for ordered in (folders, folders[::-1]):
        verdicts = judge(compared(ordered), against="FA_mxfp8")
        assert verdicts.floors == ()
        assert [each.words.partition(" (")[0] for each in verdicts.schemes] == ["cannot be told"]


def test_noise_is_told_from_the_pairs_of_the_verdicts(runs: Runs) -> None:
    """Of bf16 and of another scheme, and several seeds without a bf16 run; whatever else there is."""
    end = ": no gap can be told from noise, whatever its size"
    mxfp8 = [runs.add("FA_mxfp8", seed=seed) for seed in (1, 2, 3)]
    mxfp4 = [runs.add("linear_mxfp4", seed=seed) for seed in (1, 2, 3)]
    bf16 = [runs.add(seed=seed) for seed in (1, 2)]
    paired = (
        "seeds, each paired with the {} run of its own seed: a gap within their spread is noise"
    )
    unpaired = f"3 seeds, but no scheme has two matched pairs{end}"
    assert judge(compared(mxfp8 + mxfp4)).noise == unpaired
    assert judge(compared(mxfp8 + bf16[:1])).noise == unpaired
    assert judge(compared(mxfp8 + bf16)).noise == f"2 {paired.format('bf16')}"
    against = judge(compared(mxfp8 + mxfp4), against="FA_mxfp8")
    assert against.noise == f"3 {paired.format('FA_mxfp8')}"
    one = f"one seed for each scheme{end}"
    assert judge(compared([bf16[0], mxfp8[0], mxfp4[0]])).noise == one
    assert judge(compared([*bf16, mxfp8[0]])).noise == one, "seeds of bf16 are not the scheme's"
    assert judge(compared(bf16)).noise == f"2 seeds, but no scheme has two matched pairs{end}"


def test_schemes_of_unlike_lengths_have_windows_of_their_own(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.2, 0.3]})
    for seed in (1, 2, 3):
        folders += [
            runs.add(scheme, [6.0, 5.0], seed=seed, iterations=2)
            for scheme in ("bf16", "linear_mxfp8")
        ]
    verdicts = judge(compared(folders))
    assert {each.label: each.window for each in verdicts.schemes} == {
        "FA_mxfp8": (19, 20),
        "linear_mxfp8": (2, 2),
    }
    assert verdicts.window == "the last iterations of each run"


def without_lines(run: RunDir, iterations: Sequence[int]) -> None:
    lines = run.metrics.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["iteration"] not in iterations]
    run.metrics.write_text("".join(kept))


def test_a_seed_without_half_of_its_window_is_left_out_and_fewer_gaps_are_named(
    runs: Runs,
) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12, 0.13]})
    without_lines(folders[-1], range(11, 20))
    without_lines(folders[1], (14, 16))
    comparison = compared(folders)
    assert "FA_mxfp8 seed 4: metrics.jsonl has no loss of iterations 11-19" in comparison.warnings
    verdicts = judge(comparison, window=10)
    verdict = verdict_of(verdicts, "FA_mxfp8")
    assert verdict.left_out == (LeftOut(4, "9 of 10 iterations of the window missing"),)
    assert verdicts.window == "iterations 11 to 20 (at least 8 of 10 recorded)"
    for run in folders[4:]:
        without_lines(run, range(11, 20))
    (scheme,) = judge(compared(folders), window=10).unjudged
    assert scheme.full_words == (
        "no seed to judge: 4 of 4 seeds left out (9 of 10 iterations of the window missing)"
    )


def test_an_iteration_with_two_lines_is_named_and_the_last_counts(runs: Runs) -> None:
    run = runs.add("FA_mxfp8")
    with run.metrics.open("a") as stream:
        stream.write(json.dumps({"iteration": 4, "loss": 9.0}) + "\n")
    comparison = compared([runs.add(), run])
    assert comparison.warnings == (
        "FA_mxfp8: metrics.jsonl has iterations more than once, of which the last line counts: 4",
    )
    assert comparison.rows[1].side.losses.losses[-1] == 9.0


def test_a_measure_besides_the_loss_with_two_values_of_an_iteration_is_named(runs: Runs) -> None:
    run = runs.add("FA_mxfp8")
    with run.metrics.open("a") as stream:
        for value in (3.0, 4.0):
            stream.write(json.dumps({"iteration": 4, "validation_loss": value}) + "\n")
    assert (
        "FA_mxfp8: metrics.jsonl has iterations more than once, of which the last line counts: 4"
        in compared([runs.add(), run], "validation_loss").warnings
    )


@pytest.mark.parametrize("num_others", [1, 2, 9])
def test_a_gap_inside_the_chaos_floor_is_so_whatever_else_is_compared(num_others: int) -> None:
    """The gaps of `linear_mxfp4` in docs/experiments: p is 0.024 by itself, and the floor is 0.0503."""
    gaps = {1234: 0.0219, 1235: 0.0182, 1236: 0.0308}
    others = {1234: -0.0008, 1235: -0.0109, 1236: -0.0044}
    drafts = [verdict_on("linear_mxfp4", "bf16", gaps, 3.0, (541, 600))]
    drafts += [verdict_on("linear_mxfp8", "bf16", others, 3.0, (541, 600))] * num_others
    floors = Floors("bf16", 0.0503, 3, 0.0744, 3)
    words = [verdict.words for verdict in conclude(drafts, [floors] * len(drafts))]
    assert words == ["inside the chaos floor"] * len(drafts)


SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "t of 3": lambda rng, shape: rng.standard_t(3, size=shape),
    "log-normal": lambda rng, shape: np.exp(rng.normal(size=shape)) - math.exp(0.5),
    "exponential": lambda rng, shape: 1 - rng.exponential(size=shape),
    "two values": lambda rng, shape: rng.choice([-1, 1], shape) + 1e-4 * rng.normal(size=shape),
}


@pytest.mark.parametrize("num_pairs", [0, 3])
@pytest.mark.parametrize("num_seeds", [3, 5, 6, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_of_no_shape_is_called_a_difference_more_often_than_the_level(
    shape: str, num_seeds: int, num_pairs: int
) -> None:
    """With a mean of zero, and with the same noise in perturbed runs, or without such runs; four standard errors aside.

    Student's t alone calls 16 to 18% of log-normal gaps a difference, and 25% of three gaps of two values.
    """
    rng, trials = np.random.default_rng(7), 250
    drafts, floors = [], []
    for _ in range(trials):
        gaps = SHAPES[shape](rng, (num_seeds,))
        drafts.append(verdict_on("A", "bf16", dict(enumerate(map(float, gaps))), 3.0, (1, 1)))
        floor = floor_of(list(map(float, SHAPES[shape](rng, (num_pairs,)))))
        floors.append(Floors("bf16", floor, num_pairs, None, 1))
    pairs = zip(drafts, floors, strict=True)
    words = [conclude([draft], [own])[0].words for draft, own in pairs]
    alarms = sum(each in ("above bf16", "below bf16") for each in words) / trials
    assert alarms < 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.parametrize(
    ("num_seeds", "chaos", "least"),
    [(3, 0.1, 0.9), (4, 0.1, 0.9), (6, None, 0.45), (10, None, 0.6)],
)
def test_a_difference_of_ten_deviations_is_told(
    num_seeds: int, chaos: float | None, least: float
) -> None:
    """From three seeds on beside perturbed runs; without them by six or more, unless their gaps look skewed."""
    rng = np.random.default_rng(3)
    floors = Floors("bf16", chaos and t_quantile(3) * chaos, 3, None, 1)
    words = []
    for _ in range(100):
        gaps = dict(enumerate(map(float, 1 + 0.1 * rng.normal(size=num_seeds))))
        (verdict,) = conclude([verdict_on("A", "bf16", gaps, 3.0, (1, 1))], [floors])
        words.append(verdict.words)
    assert words.count("above bf16") >= 100 * least
