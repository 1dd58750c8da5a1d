from __future__ import annotations

from typing import Any

from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.labels import labels_of
from quantexp.analysis.compare.lines import lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import judge
from quantexp.runs.paths import RunDir

from .runs import Runs


def labels(*runs: RunDir) -> list[str]:
    return labels_of([read_side(run) for run in runs])


def sweep(runs: Runs) -> list[RunDir]:
    """Two learning rates and two seeds in bf16, perturbed, and under a scheme."""
    points: list[dict[str, Any]] = [
        {"lr": lr, "warmup": 100 * lr, "seed": seed} for lr in (1e-4, 3e-4) for seed in (1, 2)
    ]
    bf16 = [runs.add(**point) for point in points]
    perturbed = [runs.add(chaos=1, **point) for point in points]
    return [*bf16, *perturbed, *(runs.add("linear_mxfp8", **point) for point in points)]


def test_runs_of_a_scheme_are_labelled_with_the_keys_that_differ(runs: Runs) -> None:
    shown = labels(*sweep(runs))
    assert shown[::3] == [
        "bf16 lr=0.0001 seed 1",
        "bf16 lr=0.0003 seed 2",
        "bf16 lr=0.0003 chaos 1 seed 1",
        "linear_mxfp8 lr=0.0001 seed 2",
    ], "warmup differs where lr does"
    assert len(set(shown)) == len(shown)


def test_every_line_verdict_and_floor_of_a_sweep_has_its_own_label(runs: Runs) -> None:
    comparison = compare([read_side(run) for run in sweep(runs)])
    assert [line.label for line in lines_of(comparison)] == [
        "bf16 lr=0.0001, 2 seeds",
        "bf16 lr=0.0003, 2 seeds",
        "bf16 lr=0.0001, weights perturbed, 2 runs",
        "bf16 lr=0.0003, weights perturbed, 2 runs",
        "linear_mxfp8 lr=0.0001, 2 seeds",
        "linear_mxfp8 lr=0.0003, 2 seeds",
    ]
    verdicts = judge(comparison)
    assert [each.label for each in verdicts.floors] == ["bf16 lr=0.0001", "bf16 lr=0.0003"]
    assert [each.label for each in verdicts.schemes] == [
        "linear_mxfp8 lr=0.0001",
        "linear_mxfp8 lr=0.0003",
    ]


def test_runs_of_one_configuration_are_labelled_with_their_hashes(runs: Runs) -> None:
    shown = labels(runs.add("FA_mxfp8"), runs.add("FA_mxfp8"))
    assert shown == ["FA_mxfp8 00000000", "FA_mxfp8 00000001"]
