"""Seeds and runs that have no part in a verdict, each with its reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import Any

import yaml

from quantexp.analysis.compare.floors import LeftOut
from quantexp.analysis.compare.verdicts import (
    conclude,
    judge,
    verdict_on,
)
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State

from .runs import Runs, change_json
from .seeds import CHAOS, SEEDS, compared, curve, design, verdict_of


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
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]}, CHAOS)
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


def test_a_run_whose_proof_or_training_failed_never_counts(runs: Runs) -> None:
    """Neither beside a whole bf16 run, nor beside one that ended in the same way at the same iteration."""
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]})
    ended: dict[str, Any] = {"iterations": 20, "state": State.FAILED}
    unproved_bf16 = runs.add(losses=curve(3), seed=5, iterations=20, proved=False)
    change_json(unproved_bf16.precision, failures=[])  # its entries say mismatch
    alike = [
        runs.add("bf16", [6.1] * 9, seed=6, **ended),
        runs.add("FA_mxfp8", [6.1] * 9, seed=6, **ended),
    ]
    folders += [
        runs.add("FA_mxfp8", curve(3), seed=4, iterations=20, proved=False),
        unproved_bf16,
        runs.add("FA_mxfp8", curve(3), seed=5, iterations=20),
        *alike,
        runs.add("bf16", curve(3.2), seed=7, iterations=20),
        runs.add("FA_mxfp8", curve(3.3), seed=7, **ended),
        runs.add("bf16", curve(3.4), seed=8, iterations=20),
        runs.add("FA_mxfp8", curve(3.5), seed=8, **ended),
        runs.add("bf16", curve(3.6), seed=9, iterations=20),
        runs.add("FA_mxfp8", curve(3.7), seed=9, iterations=20),
    ]
    change_json(folders[-3].status, trained="2026-01-01T00:00:00+00:00")
    change_json(folders[-1].precision, proved=False)  # its operands had values that are not finite
    verdicts = judge(compared(folders))
    verdict = verdict_of(verdicts, "FA_mxfp8")
    assert verdict.seeds == (1, 2, 3)
    assert [(each.seed, each.why) for each in verdict.left_out] == [
        (4, "proof failed"),
        (5, "bf16 proof failed"),
        (6, "failed"),
        (7, "failed"),
        (8, "failed"),
        (9, "proof failed"),
    ]
    (floors,) = verdicts.floors
    assert floors.num_seeds == 7, "without the two bf16 runs that failed"
    assert judge(compared(alike)).schemes == ()


def test_floors_of_running_seeds_leave_out_one_whose_proof_failed(runs: Runs) -> None:
    running: dict[str, Any] = {"iterations": 40, "state": State.RUNNING}
    folders = [
        runs.add(scheme, curve(3 + seed), seed=seed, proved=seed < 3, **running)
        for scheme in ("bf16", "FA_mxfp8")
        for seed in (1, 2, 3)
    ]
    verdicts = judge(compared(folders))
    assert verdict_of(verdicts, "FA_mxfp8").seeds == (1, 2)
    (floors,) = verdicts.floors
    assert floors.num_seeds == 2


def test_seeds_of_other_code_than_their_bf16_run_are_left_out(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]})
    for run in folders:
        change_json(run.provenance, code="a1" * 8)
    for run in folders[-3:]:
        change_json(run.provenance, code="b2" * 8)
    (scheme,) = judge(compared(folders)).unjudged
    assert scheme.full_words == "no seed to judge: 3 of 3 seeds left out (code)"


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


def copy_of(run: RunDir, seed: int, chaos: int = 0) -> RunDir:
    """A copy of a run's folder that calls itself another seed."""
    copy = RunDir(run.root.with_name(f"{run.root.name}{seed}{chaos}"))
    shutil.copytree(run.root, copy.root)
    config = yaml.safe_load(copy.config.read_text())
    changes = {"seed": seed} | ({"chaos": chaos} if chaos else {})
    config["training"] |= changes
    copy.config.write_text(yaml.safe_dump(config))
    identity = json.loads(copy.provenance.read_text())["identity"]
    identity["training"] |= changes
    change_json(copy.provenance, identity=identity)
    return copy


def test_copies_of_a_run_under_other_seeds_count_once(runs: Runs) -> None:
    folders = [runs.add("bf16", curve(4), seed=1, iterations=20)]
    folders.append(runs.add("FA_mxfp8", curve(4.1), seed=1, iterations=20))
    folders += [copy_of(run, seed) for seed in (2, 3, 4) for run in folders[:2]]
    comparison = compared(folders)
    verdicts = judge(comparison)
    verdict = verdict_of(verdicts, "FA_mxfp8")
    assert verdict.seeds == (1,)
    assert verdict.full_words == (
        "cannot be told (needs 3 seeds or more); 3 of 4 seeds left out (the same run as FA_mxfp8 seed 1)"
    )
    assert (
        "FA_mxfp8 seed 3 has the numbers of FA_mxfp8 seed 1: they are the same run, which counts once"
        in comparison.warnings
    )
    assert verdicts.floors[0].num_seeds == 1
    alone = judge(compared([run for run in folders if "FA_mxfp8" in run.root.name]))
    for each in (verdicts, alone):
        assert each.noise.startswith("one seed for each scheme: no gap can be told from noise")


def test_a_copied_bf16_run_is_no_other_seed_and_no_perturbed_run(runs: Runs) -> None:
    folders = [runs.add("bf16", curve(4), seed=1, iterations=20)]
    folders += [copy_of(folders[0], 2), copy_of(folders[0], 1, chaos=1)]
    folders += [
        runs.add("FA_mxfp8", curve(4 + seed / 10), seed=seed, iterations=20) for seed in (1, 2)
    ]
    verdicts = judge(compared(folders[::-1]))
    verdict = verdict_of(verdicts, "FA_mxfp8")
    assert len(verdict.seeds) == 1
    assert "is the same run as bf16 seed" in verdict.full_words
    (floors,) = verdicts.floors
    assert (floors.num_chaos, floors.num_seeds) == (0, 1)


def test_seeds_whose_gaps_are_the_same_are_one_run_unless_the_scheme_changes_nothing(
    runs: Runs,
) -> None:
    verdicts = judge(compared(design(runs, {"FA_mxfp8": [0.1, 0.1, 0.2, 0.1]})))
    assert verdict_of(verdicts, "FA_mxfp8").seeds == (1, 3)
    runs.root = runs.root / "more"
    verdicts = judge(compared(design(runs, {"FA_mxfp8": [0.0, 0.0, 0.0]})))
    assert verdict_of(verdicts, "FA_mxfp8").seeds == (1, 2, 3)
    (same,) = conclude(
        [verdict_on("A", "bf16", dict.fromkeys((1, 2, 3), 0.1), 3.0, (1, 1))], [None]
    )
    assert same.words == "cannot be told (all gaps are the same)"


def test_copied_folders_count_once_and_raise_no_number_of_schemes(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]}, CHAOS)
    backup = runs.root.with_name("backup")
    shutil.copytree(runs.root, backup)
    comparison = compared([*folders, *(RunDir(backup / run.root.name) for run in folders)])
    verdicts = judge(comparison)
    (verdict,) = verdicts.schemes
    assert (verdict.seeds, len(verdict.left_out)) == ((1, 2, 3), 3)
    assert (verdict.p_holm, verdict.words) == (verdict.p_value, "above bf16")
    assert (verdicts.floors[0].num_chaos, verdicts.floors[0].num_seeds) == (2, 4)
    assert len({row.label for row in comparison.rows}) == len(comparison.rows)
    assert sum("they are the same run" in warning for warning in comparison.warnings) == 9


def test_equal_losses_of_another_configuration_are_a_run_of_their_own(runs: Runs) -> None:
    folders = design(runs, {"FA_mxfp8": [0.1, 0.11, 0.12]})
    folders += [
        runs.add("FA_mxfp8", curve(3 + seed + gap), seed=seed, iterations=20, weight_decay=0.2)
        for seed, gap in zip(SEEDS, [0.1, 0.11, 0.12], strict=False)
    ]
    assert not any(row.same_as for row in compared(folders).rows)
