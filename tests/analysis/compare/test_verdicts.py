"""Verdicts over seeds: what is paired, what is corrected, and that noise is called so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import yaml

from quantexp.analysis.compare.comparison import Comparison, compare
from quantexp.analysis.compare.pairs import LeftOut
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import (
    Verdict,
    Verdicts,
    conclude,
    judge,
    verdict_on,
)
from quantexp.errors import RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State

from .runs import Runs

ITERATIONS = 20
SEEDS = range(1, 5)


def compared(folders: Sequence[RunDir], measure: str = "loss") -> Comparison:
    return compare([read_side(run, measure) for run in folders])


def curve(end: float) -> list[float]:
    """A loss whose last two values, a tenth of twenty, have the mean `end`."""
    return [6.0] * (ITERATIONS - 2) + [end + 0.5, end - 0.5]


def design(
    runs: Runs, gaps: Mapping[str, Sequence[float]], chaos: Sequence[float] = ()
) -> list[RunDir]:
    """Bf16 at each seed, each scheme at each seed with its gap, and perturbed bf16 runs of the first seed."""
    folders = [runs.add("bf16", curve(3 + seed), seed=seed, iterations=20) for seed in SEEDS]
    for scheme, values in gaps.items():
        for seed, gap in zip(SEEDS, values, strict=False):
            folders.append(runs.add(scheme, curve(3 + seed + gap), seed=seed, iterations=20))
    for number, gap in enumerate(chaos, 1):
        folders.append(runs.add("bf16", curve(4 + gap), seed=1, iterations=20, chaos=number))
    return folders


def verdict_of(verdicts: Verdicts, scheme: str) -> Verdict:
    (verdict,) = (each for each in verdicts.schemes if each.label == scheme)
    return verdict


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
    assert verdict.words == "cannot be told (would need about 4 seeds)"


def test_a_clear_gap_is_above_or_below_and_a_window_may_be_chosen(runs: Runs) -> None:
    gaps = {"FA_mxfp8": [0.1, 0.11, 0.12], "linear_mxfp4": [-0.1, -0.11, -0.12]}
    comparison = compared(design(runs, gaps))
    verdicts = judge(comparison)
    assert verdict_of(verdicts, "FA_mxfp8").words == "above bf16"
    assert verdict_of(verdicts, "linear_mxfp4").words == "below bf16"
    early = judge(comparison, window=20)
    assert early.window == "iterations 1 to 20"
    assert verdict_of(early, "FA_mxfp8").mean == pytest.approx(0.011)


def test_several_schemes_are_corrected_for_their_number(runs: Runs) -> None:
    """Differences of 0.1, 0.12 and 0.15 have p = 0.014: enough alone, and not among four schemes."""
    gap, noise = [0.1, 0.12, 0.15], [0.1, -0.1, 0.02]
    alone = judge(compared(design(runs, {"FA_mxfp8": gap})))
    verdict = verdict_of(alone, "FA_mxfp8")
    assert verdict.p_holm == verdict.p_value == pytest.approx(0.0136, abs=1e-4)
    assert verdict.words == "above bf16"
    runs.root = runs.root / "more"
    others = {f"linear_mxfp{i}": noise for i in (4, 6, 8)}
    among = judge(compared(design(runs, {"FA_mxfp8": gap, **others})))
    verdict = verdict_of(among, "FA_mxfp8")
    assert verdict.p_holm == pytest.approx(4 * 0.0136, abs=4e-4)
    assert verdict.words == "cannot be told beside so many schemes (would need more seeds)"


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
    assert words[1].startswith("cannot be told")


def test_without_spread_worth_a_seed_no_number_of_them_is_named(runs: Runs) -> None:
    verdicts = judge(compared(design(runs, {"FA_mxfp8": [1.0, -1.0, 0.001]})))
    assert (
        verdict_of(verdicts, "FA_mxfp8").words == "cannot be told (would need more than 1000 seeds)"
    )


def test_two_schemes_are_held_against_each_other_seed_by_seed(runs: Runs) -> None:
    gaps = {"FA_mxfp8": [0.5, 0.1, 0.3], "linear_mxfp4": [0.61, 0.2, 0.42]}
    verdicts = judge(compared(design(runs, gaps)), against="FA_mxfp8")
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


def test_runs_that_are_no_matched_pair_give_no_verdict(runs: Runs) -> None:
    folders = [runs.add(seed=seed) for seed in SEEDS]
    folders += [runs.add("FA_mxfp8", seed=seed, lr=1.0) for seed in SEEDS]
    verdicts = judge(compared(folders))
    assert verdicts.schemes == ()
    (scheme,) = verdicts.unjudged
    assert scheme.full_words == "no seed to judge: 4 of 4 seeds left out (training)"
    assert verdicts.window == "the last iterations of each run"
    assert not judge(compared(folders[:1] + folders[4:5])).has_seeds, "one seed"


def test_seeds_without_an_end_to_compare_are_left_out_with_the_reason(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]})
    folders.append(runs.add("FA_mxfp8", [*curve(3)[:-1], None], seed=4, iterations=20))
    broken = [
        runs.add("linear_mxfp4", [None], seed=1, iterations=20),
        runs.add("linear_mxfp4", [6.0, 5.0], seed=2, iterations=20, state=State.FAILED),
        runs.add("linear_mxfp4", [6.0, 5.0], seed=3, iterations=20),
        runs.add("linear_mxfp4", curve(3), seed=9, iterations=20),
    ]
    verdicts = judge(compared([*folders, *broken]))
    verdict = verdict_of(verdicts, "FA_mxfp8")
    assert verdict.seeds == (1, 2, 3)
    assert verdict.full_words == "above bf16; 1 of 4 seeds left out (not finite)"
    assert asdict(verdict)["left_out"] == ({"seed": 4, "why": "not finite"},)
    (scheme,) = verdicts.unjudged
    assert (scheme.label, verdicts.has_seeds) == ("linear_mxfp4", True)
    assert [each.why for each in scheme.left_out] == [
        "not finite",
        "failed",
        "length",
        "no usable bf16 run of its seed",
    ]
    against = judge(compared([*folders, *broken[1:2]]), against="linear_mxfp4")
    (scheme, other) = against.unjudged
    assert (scheme.label, other.label) == ("bf16", "FA_mxfp8")
    assert [each.why for each in other.left_out] == [
        "no usable linear_mxfp4 run of its seed",
        "linear_mxfp4 failed",
        "no usable linear_mxfp4 run of its seed",
        "not finite",
    ]


def test_a_bf16_run_that_diverged_has_no_part_in_verdicts_or_floors(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]}, chaos=[0.03])
    diverged = [*curve(60)[:-1], None]
    folders.append(runs.add(losses=diverged, seed=5, iterations=20))
    folders.append(runs.add(losses=curve(8), seed=5, iterations=20, chaos=1))
    folders.append(runs.add(losses=diverged, seed=1, iterations=20, chaos=2))
    folders.append(runs.add("FA_mxfp8", curve(8), seed=5, iterations=20))
    verdicts = judge(compared(folders))
    assert verdict_of(verdicts, "FA_mxfp8").left_out == (LeftOut(5, "bf16 not finite"),)
    (floors,) = verdicts.floors
    assert (floors.num_chaos, floors.num_seeds) == (1, 4)


def test_a_seed_without_the_measure_is_left_out(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.2, 0.3]})
    for run in folders[:-1]:
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        lines = [{**line, "validation_loss": line["loss"]} for line in lines]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = verdict_of(judge(compared(folders, "validation_loss")), "FA_mxfp8")
    assert verdict.left_out == (LeftOut(3, "no validation_loss"),)


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


def test_noise_is_called_a_difference_at_the_nominal_rate() -> None:
    """Heavy-tailed losses that drift together, with no difference: 1 alarm in 20 at most, four standard errors aside.

    Student's t over five seeds is known to raise fewer alarms than that on heavy tails (t of 3 degrees of freedom).
    """
    rng = np.random.default_rng(7)
    trials, alarms = 2000, 0
    for _ in range(trials):
        drift = np.cumsum(rng.normal(size=(5, 50)), axis=1)
        ours, theirs = (drift + rng.standard_t(3, size=(5, 50)) for _ in range(2))
        gaps = dict(enumerate(map(float, (ours - theirs)[:, -5:].mean(axis=1))))
        (verdict,) = conclude([verdict_on("A", "bf16", gaps, 3.0, (46, 50))], [None])
        alarms += verdict.words in ("above bf16", "below bf16")
    assert 0.02 < alarms / trials < 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)
