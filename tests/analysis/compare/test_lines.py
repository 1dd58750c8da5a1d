from __future__ import annotations

from typing import Any

import numpy as np
import yaml

from quantexp.analysis.compare.comparison import Comparison, compare
from quantexp.analysis.compare.lines import lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.scheme_style import scheme_style
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from tests.analysis.compare.runs import Runs, change_json

LOSSES = {1: [6.0, 5.0, 4.0], 2: [6.5, 5.5, 4.6], 3: [5.0, 5.1, 4.1]}


def compared(*runs: RunDir) -> Comparison:
    return compare([read_side(run) for run in runs])


def configure(run: RunDir, **sections: dict[str, Any]) -> None:
    """Change sections of a run's configuration that are no part of its identity."""
    config = yaml.safe_load(run.config.read_text())
    run.config.write_text(yaml.safe_dump(config | sections))


def test_seeds_of_a_scheme_are_one_line_with_a_band(runs: Runs) -> None:
    folders = []
    for seed, losses in LOSSES.items():
        folders.append(runs.add("bf16", losses, seed=seed))
        folders.append(runs.add("linear_mxfp8", [loss + 0.1 * seed for loss in losses], seed=seed))
    bf16, mxfp8 = lines_of(compared(*folders))
    table = np.array(list(LOSSES.values()))
    assert (bf16.label, mxfp8.label) == ("bf16, 3 seeds", "linear_mxfp8, 3 seeds")
    assert (bf16.rows, mxfp8.rows) == ((0, 2, 4), (1, 3, 5))
    assert bf16.losses.iterations == (1, 2, 3)
    np.testing.assert_allclose(bf16.losses.low, table.min(0))
    np.testing.assert_allclose(bf16.losses.mean, table.mean(0))
    np.testing.assert_allclose(bf16.losses.high, table.max(0))


def test_gaps_are_paired_by_seed_before_they_are_averaged(runs: Runs) -> None:
    folders = []
    for seed, losses in LOSSES.items():
        folders.append(runs.add("bf16", losses, seed=seed))
        folders.append(runs.add("linear_mxfp8", [loss + 0.1 * seed for loss in losses], seed=seed))
    bf16, mxfp8 = lines_of(compared(*folders))
    assert bf16.is_baseline
    assert bf16.gaps.iterations == ()
    np.testing.assert_allclose(mxfp8.gaps.low, 0.1)
    np.testing.assert_allclose(mxfp8.gaps.mean, 0.2)
    np.testing.assert_allclose(mxfp8.gaps.high, 0.3)


def test_a_band_has_the_iterations_that_all_of_its_runs_have(runs: Runs) -> None:
    folders = [runs.add("bf16", [6.0, 5.0, 4.0], seed=1), runs.add("bf16", [6.1], seed=2)]
    (line,) = lines_of(compared(*folders))
    assert line.losses.iterations == (1,)


def test_a_diverged_or_failed_seed_has_no_part_in_the_lines_of_its_scheme(runs: Runs) -> None:
    ends = [3.0 + seed / 1000 for seed in (1, 2, 3, 4)]
    folders = [runs.add("bf16", [6.0, 5.0, 4.0, ends[i]], seed=i + 1) for i in range(4)]
    folders += [
        runs.add("FA_mxfp8", [6.0, 5.0, 4.0, 3.1 - ends[i] / 100], seed=i + 1) for i in (0, 1)
    ]
    folders.append(runs.add("FA_mxfp8", [6.0, None, None, None], seed=3))
    folders.append(runs.add("FA_mxfp8", [7.0], seed=4, state=State.FAILED))
    bf16, mxfp8 = lines_of(compared(*folders))
    assert (bf16.label, mxfp8.label) == ("bf16, 4 seeds", "FA_mxfp8, 2 of 4 seeds")
    assert mxfp8.rows == (4, 5, 6, 7)
    assert mxfp8.losses.iterations == mxfp8.gaps.iterations == (1, 2, 3, 4)
    assert mxfp8.losses.high == (6.0, 5.0, 4.0, 3.1 - ends[0] / 100)


def test_seeds_of_different_code_are_no_band(runs: Runs) -> None:
    folders = [runs.add("bf16", seed=seed) for seed in (1, 2, 3)]
    for run, code in zip(folders, ("a1" * 8, "b2" * 8, "a1" * 8), strict=True):
        change_json(run.provenance, code=code)
    assert [line.label for line in lines_of(compared(*folders))] == [
        "bf16 code a1a1a1a1, 2 seeds",
        "bf16 code b2b2b2b2 seed 2",
    ]


def test_runs_whose_proof_failed_count_as_no_seeds(runs: Runs) -> None:
    folders = [runs.add("bf16", seed=seed) for seed in (1, 2, 3)]
    folders += [runs.add("FA_mxfp8", seed=seed, proved=seed == 1) for seed in (1, 2, 3)]
    folders += [runs.add("linear_mxfp8", seed=seed, proved=False) for seed in (1, 2)]
    assert [line.label for line in lines_of(compared(*folders))] == [
        "bf16, 3 seeds",
        "FA_mxfp8, 1 of 3 seeds",
        "linear_mxfp8, 0 of 2 seeds",
    ]


def test_a_seed_without_its_bf16_run_is_left_out_and_a_scheme_without_any_is_drawn_whole(
    runs: Runs,
) -> None:
    folders = [runs.add(seed=1), runs.add("FA_mxfp8", seed=1), runs.add("FA_mxfp8", seed=2)]
    folders += [runs.add("linear_mxfp4", seed=seed) for seed in (3, 4)]
    labels = [line.label for line in lines_of(compared(*folders))]
    assert labels == ["bf16 seed 1", "FA_mxfp8, 1 of 2 seeds", "linear_mxfp4, 2 seeds"]


def test_runs_of_one_scheme_that_differ_by_more_than_the_seed_are_lines_of_their_own(
    runs: Runs,
) -> None:
    folders = [
        runs.add("linear_mxfp4", seed=1),
        runs.add("linear_mxfp4", seed=1, lr=3e-4),
        runs.add("linear_mxfp4", seed=2, lr=9e-4),
    ]
    lines = lines_of(compared(*folders))
    assert len(lines) == len({(line.style.colour, line.style.dash) for line in lines}) == 3


def test_seeds_of_a_scheme_with_other_captures_or_launchers_are_one_line(runs: Runs) -> None:
    folders = [runs.add("linear_mxfp4", seed=seed) for seed in (1, 2, 3, 4)]
    local = {"kind": "local", "num_processes": 1}
    configure(folders[0], launcher=local)
    configure(folders[1], launcher=local, capture={"level": "stats"}, checkpoint={"every": 2})
    configure(folders[2], launcher={"kind": "slurm", "num_processes": 1})
    configure(folders[3], launcher={"kind": "slurm", "num_processes": 2})
    one, other = lines_of(compared(*folders))
    assert (one.label, one.rows) == ("linear_mxfp4 num_processes=1, 3 seeds", (0, 1, 2))
    assert (other.label, other.rows) == ("linear_mxfp4 num_processes=2 seed 4", (3,))


def test_the_baseline_has_the_neutral_style_whatever_its_name_is(runs: Runs) -> None:
    bf16 = runs.add("bf16", name="mine-00000000")
    lines = lines_of(compared(bf16, runs.add("linear_mxfp4")))
    assert lines[0].style == scheme_style("bf16")
    assert lines[1].style == scheme_style("linear_mxfp4")


def test_perturbed_runs_are_one_line_whose_gaps_are_chance(runs: Runs) -> None:
    folders = [runs.add(seed=seed) for seed in (1, 2)]
    folders += [
        runs.add(losses=[6.0, 5.0, 4.0, 3.5 + 0.1 * number + 0.01 * seed], seed=seed, chaos=number)
        for seed in (1, 2)
        for number in (1, 2)
    ]
    baseline, perturbed = lines_of(compared(*folders))
    assert baseline.rows == (0, 1)
    assert perturbed.rows == (2, 3, 4, 5)
    assert perturbed.label == "bf16, weights perturbed, 4 runs"
    assert perturbed.is_perturbed
    assert not perturbed.is_baseline
    np.testing.assert_allclose(perturbed.gaps.low[-1], 0.11, atol=2e-3)
    np.testing.assert_allclose(perturbed.gaps.high[-1], 0.22, atol=2e-3)
    assert perturbed.style != baseline.style
