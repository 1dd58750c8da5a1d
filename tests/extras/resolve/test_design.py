"""Which runs, checkpoints and text a design takes, and which branches count."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.config.load import save
from quantexp.errors import RunError
from quantexp.extras.resolve.design import Arm, Base, Branch, Design, Unit, bases_of, checkpoints_of
from quantexp.extras.resolve.design import units_of as units_with
from quantexp.extras.resolve.driving import line_of
from quantexp.extras.resolve.outcome import Measure, Outcome, outcome_of
from quantexp.extras.resolve.plan import plan_of
from quantexp.extras.resolve.results import append, cut_incomplete, read_results
from quantexp.launch.recorded import recorded
from quantexp.model.checkpoints import STATE, STATE_INDEX, folder_of
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

Tiny = Callable[..., Experiment]
MakeBase = Callable[..., RunDir]
STEPS = (10, 50)
PROVENANCE = {
    **dict.fromkeys(("quantexp", "python", "code", "host", "platform", "folder", "created"), ""),
    **{"packages": {}, "source": {"commit": None, "diff": None}, "command": []},
}


@pytest.fixture
def make_base(tiny: Tiny, tmp_path: Path) -> MakeBase:
    """A run's folder, as far as a design reads it before it composes."""

    def make(
        name: str, seed: int, *words: str, saved: tuple[int, ...] = (), **identity: object
    ) -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        run.root.mkdir(parents=True)
        experiment = tiny(f"training.seed={seed}", "training.iterations=100", *words)
        save(recorded(experiment), run.config)
        content = {"training": {"seed": seed, "lr": 1}, "scheme": [], **identity}
        run.provenance.write_text(json.dumps({**PROVENANCE, "identity": content}))
        for iteration in saved:
            state = folder_of(run, iteration) / STATE
            state.mkdir(parents=True)
            (state / STATE_INDEX).write_text("{}")
        return run

    return make


def test_runs_of_one_configuration_are_ordered_by_their_seeds(make_base: MakeBase) -> None:
    runs = [make_base("b", 2), make_base("a", 3), make_base("c", 1)]
    assert [base.seed for base in bases_of(runs)] == [1, 2, 3]


def test_of_a_matched_sweep_the_unperturbed_runs_in_bf16_are_taken(make_base: MakeBase) -> None:
    runs = [
        make_base("scheme", 1, "quant=linear_mxfp8"),
        make_base("moved", 1, "training.chaos=1"),
        make_base("own", 1),
    ]
    assert [base.run.root.name for base in bases_of(runs)] == ["own"]


@pytest.mark.parametrize(
    ("seeds", "identity", "message"),
    [
        ((1, 1), {}, "a and b both have training.seed=1: name one run for each seed"),
        (
            (1, 2),
            {"data": {"x": "1"}},
            "a and b differ in data: name runs that differ in the seed alone",
        ),
        (
            (1, 2),
            {"training": {"seed": 2, "lr": 2}},
            "a and b differ in training.lr: name runs that",
        ),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_refused(
    make_base: MakeBase, seeds: tuple[int, int], identity: dict[str, object], message: str
) -> None:
    runs = [make_base("a", seeds[0]), make_base("b", seeds[1], **identity)]
    with pytest.raises(RunError, match=message):
        bases_of(runs)


def test_a_run_of_several_processes_is_refused(make_base: MakeBase) -> None:
    run = make_base("a", 1, "launcher.num_processes=2", "training.global_batch_size=4")
    with pytest.raises(RunError, match="a has 2 processes, and a branch trains in one"):
        bases_of([run])


def test_checkpoints_are_those_that_all_runs_have_before_the_last_horizon(
    make_base: MakeBase,
) -> None:
    runs = [make_base("a", 1, saved=(20, 40, 60)), make_base("b", 2, saved=(20, 40, 70))]
    bases = bases_of(runs)
    assert checkpoints_of(bases, None, 60) == (20, 40)
    assert checkpoints_of(bases, None, 61) == (20,)
    assert checkpoints_of(bases, [40], 50) == (40,)
    message = "--from 60 must be a checkpoint with a training state in every run, 30 iterations before its end at 100"
    with pytest.raises(RunError, match=message):
        checkpoints_of(bases, [60], 30)
    with pytest.raises(
        RunError, match="no checkpoint with a training state that all 2 runs have is 81"
    ):
        checkpoints_of(bases, None, 81)


@pytest.fixture
def bases(tiny: Tiny, tmp_path: Path) -> tuple[Base, ...]:
    return tuple(
        Base(RunDir(tmp_path / f"run{seed}"), tiny(f"training.seed={seed}")) for seed in range(1, 8)
    )


@pytest.fixture
def design(bases: tuple[Base, ...], tmp_path: Path) -> Design:
    arms = tuple(
        Arm(name, bases[0].experiment.quant, control)
        for name, control in (("bf16", None), ("mxfp4", None), ("bf16 chaos", "chaos"))
    )
    folder = tmp_path / "branch"
    folder.mkdir()
    units = list(units_with(bases, (20, 40), 8, {}))
    branches = tuple(
        Branch(unit, arm, unit.base.experiment, RunDir(folder / f"{index}_{arm.name}"))
        for index, unit in enumerate(units)
        for arm in arms
    )
    return Design(folder, bases, (20, 40), arms, STEPS, 8, branches, "code")


def test_each_unit_has_text_of_its_own_and_keeps_it(
    design: Design, bases: tuple[Base, ...]
) -> None:
    first = [branch.unit for branch in design.branches[::3]]
    assert len({unit.first_sequence for unit in first}) == len(first) == 14
    assert design.sequences_in_all == 14 * 8
    record(design, {"bf16": (1.0, 1.0)}, units=first[2:4])
    more = list(units_with(bases[:3], (20, 30, 40), 8, read_results(design.folder)))
    kept = {(unit.base.seed, unit.checkpoint): unit.first_sequence for unit in more}
    assert (kept[2, 20], kept[2, 40]) == (first[2].first_sequence, first[3].first_sequence)
    assert len(set(kept.values())) == 9


def record(
    design: Design,
    losses: dict[str, tuple[float | None, float | None]],
    units: list[Unit] | None = None,
    failure: str | None = None,
) -> None:
    """Write the lines of arms: the losses at both horizons, plus a hundredth of the seed."""
    for branch in design.branches:
        if branch.arm.name not in losses or (units is not None and branch.unit not in units):
            continue
        of_seed = branch.unit.base.seed / 100
        own = [None if loss is None else loss + of_seed for loss in losses[branch.arm.name]]
        content = {"working_loss": own, "scheme_loss": [2 * loss if loss else None for loss in own]}
        rest = {"skipped": 0, "cpu_s": 2.0, "failure": failure}
        append(design.folder, line_of(design, branch, {**content, **rest}))


def outcome(design: Design) -> Outcome:
    return outcome_of(design, read_results(design.folder), 1e-3)


def test_gaps_are_paired_within_units_and_averaged_over_checkpoints(design: Design) -> None:
    by_checkpoint = {20: (1.0, 2.0), 40: (1.2, 2.4)}
    record(design, {"bf16": (3.0, 3.0), "bf16 chaos": (3.0, 3.0)})
    for checkpoint, losses in by_checkpoint.items():
        units = [b.unit for b in design.branches if b.unit.checkpoint == checkpoint]
        record(design, {"mxfp4": losses}, units)
    result = outcome(design)
    short, long = result.schemes[Measure.WORKING]
    assert (short.steps, long.steps) == STEPS
    assert set(short.gaps) == set(range(1, 8))
    assert all(gap == pytest.approx(1.1 - 3.0) for gap in short.gaps.values())
    assert all(gap == pytest.approx(2.2 - 3.0) for gap in long.gaps.values())
    assert (short.num_units, long.num_units) == (14, 14)
    assert result.controls[0].mean == 0
    assert result.cpu_s == 2.0 * len(design.branches)
    (under, _) = result.schemes[Measure.SCHEME]
    assert under.mean == pytest.approx(2 * (1.1 - 3.0))


def test_branches_that_failed_or_are_of_other_code_or_text_count_as_none(design: Design) -> None:
    record(design, {"bf16": (3.0, 3.0), "mxfp4": (3.1, 3.1), "bf16 chaos": (3.0, 3.0)})
    units = list({branch.name: branch.unit for branch in design.branches}.values())
    record(design, {"mxfp4": (3.1, 3.1)}, units[:1], failure="mismatch")
    (one, _) = outcome(design).schemes[Measure.WORKING]
    assert one.num_units == 13
    assert len(one.gaps) == 7
    results = read_results(design.folder)
    first, second = design.branches[3], design.branches[6]
    results[first.name]["code"] = "other"
    results[second.name]["held_out"] = [0, 8000]
    assert not design.has(first, results)
    assert not design.has(second, results)
    assert design.has(design.branches[9], results)
    results[design.branches[9].name]["steps"] = [10]
    assert not design.has(design.branches[9], results)


def test_a_branch_that_diverged_leaves_its_scheme_untold(design: Design) -> None:
    record(design, {"bf16": (3.0, 3.0), "mxfp4": (3.1, None)})
    short, long = outcome(design).schemes[Measure.WORKING]
    assert short.mean == pytest.approx(0.1)
    assert (long.mean, long.note) == (None, "not finite")
    assert any(map(math.isnan, long.gaps.values()))


def test_what_a_killed_process_left_incomplete_is_cut(design: Design) -> None:
    record(design, {"bf16": (3.0, 3.0)})
    file = design.folder / "results.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"branch": "x", "ru')
    assert len(read_results(design.folder)) == 14
    cut_incomplete(design.folder)
    assert file.read_bytes() == whole


def test_the_plan_knows_the_gap_once_two_seeds_have_run(
    design: Design, bases: tuple[Base, ...]
) -> None:
    def gaps() -> list[float | None]:
        results = read_results(design.folder)
        missing = [each for each in design.branches if not design.has(each, results)]
        plan = plan_of(design, missing, results, 1e-3)
        return [each["working_loss"] for each in plan["smallest_gaps"]]

    assert gaps() == [None, None]
    record(design, {"bf16": (3.0, 3.0)})
    units = [branch.unit for branch in design.branches if branch.unit.base in bases[:2]]
    record(design, {"mxfp4": (3.1, 3.2)}, [each for each in units if each.base is bases[0]])
    assert gaps() == [None, None]
    record(design, {"mxfp4": (3.3, 3.2)}, [each for each in units if each.base is bases[1]])
    short, long = gaps()
    # Gaps of 0.1 and 0.3: a deviation of 0.141, and 1.27257 of it with seven seeds (scipy.stats.nct).
    assert short == pytest.approx(0.2 / math.sqrt(2) * 1.27257, rel=1e-3)
    assert long == pytest.approx(0, abs=1e-12)
