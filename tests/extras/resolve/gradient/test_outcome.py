"""Verdicts, tables, plan and figure of `quantexp gradient`, from lines as its processes record them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from quantexp.extras.resolve.design import Arm, Base, Branch, Unit
from quantexp.extras.resolve.gradient.design import GradientDesign
from quantexp.extras.resolve.gradient.figure import draw_outcome
from quantexp.extras.resolve.gradient.outcome import Measure, Outcome, outcome_of
from quantexp.extras.resolve.gradient.plan import plan_of
from quantexp.extras.resolve.gradient.results import Line
from quantexp.extras.resolve.gradient.table import print_outcome, record
from quantexp.extras.resolve.judging import Judgement, Verdict
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

SEEDS, CHECKPOINTS = range(1, 9), (200, 400)
GROUPS = ["embedding", "layer 0"]
#: Squared error and squared bias of each scheme, relative.
SCHEMES = {"rceil": (0.0016, 0.0010), "floor": (0.0025, 0.0020), "same": (0.0016, 0.0010)}
#: How seeds differ, as a share.
SPREAD = (0.012, -0.012, 0.006, -0.006, 0.011, -0.011, 0.003, -0.003)


def estimates(error2: float, bias2: float) -> dict[str, float | None]:
    return {"error2": error2, "bias2": bias2, "draws2": None, "cosine": 1 - error2 / 2}


def line(scheme: str, seed: int, checkpoint: int, **changes: Any) -> Line:
    error2, bias2 = SCHEMES[scheme]
    # A seed and a checkpoint change all errors alike; a scheme's own spread is a tenth of that.
    own = SPREAD[(seed + list(SCHEMES).index(scheme)) % 8] / 10
    common = (1 + SPREAD[seed - 1]) * (1 + checkpoint / 1000)
    values = [estimates(x * error2 * common * (1 + own), x * bias2 * common) for x in (1, 1, 2)]
    content = {
        "branch": f"{scheme}-{seed}-{checkpoint}",
        "run": "",
        "seed": seed,
        "checkpoint": checkpoint,
        "scheme": scheme,
        "batches": 8,
        "draws": 1,
        "by": ["product"],
        "parts": {name: {"raw": values, "adam": values} for name in ("linear.dgrad", "")},
        "groups": GROUPS,
        "signal": {"raw": [0.2, 0.2, 0.2], "adam": [0.1, 0.1, 0.1]},
        "code": "code",
        "cpu_s": 2.0,
        "failure": None,
        "time": "",
    }
    return {**content, **changes}  # type: ignore[typeddict-item]


@pytest.fixture
def design(tiny: Callable[..., Experiment], tmp_path: Path) -> GradientDesign:
    experiment = tiny("quant=linear_mxfp4")
    bases = tuple(Base(RunDir(tmp_path / str(s)), tiny(f"training.seed={s}")) for s in SEEDS)
    arms = tuple(Arm(name, experiment.quant) for name in SCHEMES)
    branches = tuple(
        Branch(
            Unit(base, checkpoint, 0),
            arm,
            experiment,
            RunDir(tmp_path / f"{arm.name}-{base.seed}-{checkpoint}"),
        )
        for base in bases
        for checkpoint in CHECKPOINTS
        for arm in arms
    )
    return GradientDesign(tmp_path, bases, CHECKPOINTS, arms, 8, 1, ("product",), branches, "code")


def results(**changes: Any) -> dict[str, Line]:
    lines = [line(name, s, c, **changes) for name in SCHEMES for s in SEEDS for c in CHECKPOINTS]
    return {each["branch"]: each for each in lines}


@pytest.fixture
def outcome(design: GradientDesign) -> Outcome:
    return outcome_of(design, results(), 0.05)


def verdict(outcome: Outcome, scheme: str, measure: Measure) -> Judgement:
    return next(x for x in outcome.verdicts["raw"][measure] if x.scheme == scheme)


def test_schemes_are_judged_by_what_they_differ_in_on_the_same_checkpoints(
    outcome: Outcome,
) -> None:
    floor = verdict(outcome, "floor", Measure.ERROR)
    assert (floor.verdict, floor.num_units) == (Verdict.ABOVE, 16)
    assert floor.mean == pytest.approx(math.log(0.0025 / 0.0016) / 2, rel=0.01)
    gaps = list(floor.gaps.values())
    low, high = stats.t.interval(0.95, 7, sum(gaps) / 8, stats.sem(gaps))
    assert floor.interval is not None
    assert [*floor.interval] == pytest.approx([low, high])
    assert verdict(outcome, "same", Measure.ERROR).verdict is Verdict.EQUIVALENT
    bias, variance = (verdict(outcome, "floor", m) for m in (Measure.BIAS, Measure.VARIANCE))
    assert (bias.verdict, variance.verdict) == (Verdict.ABOVE, Verdict.BELOW)
    # In parts of the squared error of the baseline they add up to the ratio of squares, less one.
    assert bias.mean is not None
    assert variance.mean is not None
    assert floor.mean is not None
    assert bias.mean + variance.mean == pytest.approx(math.exp(2 * floor.mean) - 1, rel=0.001)


def test_numbers_are_means_over_seeds_of_means_over_checkpoints(outcome: Outcome) -> None:
    row = outcome.rows["raw"][0]
    assert (row.scheme, row.part, len(row.numbers)) == ("rceil", "", 1 + len(GROUPS))
    number = row.numbers[0][Measure.BIAS]
    expected = {s: 0.0010 * (1 + SPREAD[s - 1]) * 1.3 for s in SEEDS}
    assert number.by_seed == pytest.approx(expected)
    low, high = number.interval or (0, 0)
    assert low < (number.mean or 0) < high
    assert row.numbers[0][Measure.DRAWS].mean is None
    assert row.numbers[2][Measure.BIAS].mean == pytest.approx(2 * (number.mean or 0))


def test_a_part_that_a_rule_begins_later_is_of_the_checkpoints_that_have_it(
    design: GradientDesign,
) -> None:
    lines = results()
    for each in lines.values():
        if each["checkpoint"] == CHECKPOINTS[0]:
            del each["parts"]["linear.dgrad"]
    _, part, *_ = outcome_of(design, lines, 0.05).rows["raw"]
    expected = {s: 0.0010 * (1 + SPREAD[s - 1]) * 1.4 for s in SEEDS}
    assert part.numbers[0][Measure.BIAS].by_seed == pytest.approx(expected)


def test_what_was_measured_otherwise_counts_as_none(design: GradientDesign) -> None:
    changes: list[dict[str, Any]] = [
        {"code": "other"},
        {"batches": 4},
        {"draws": 2},
        {"by": ["slot"]},
        {"failure": "layer 0 fc1 linear.fprop.x"},
    ]
    for each in changes:
        none = outcome_of(design, results(**each), 0.05)
        assert not any(none.rows.values()), each


def test_an_error_that_is_not_finite_is_named(design: GradientDesign) -> None:
    lines = results()
    broken = line("floor", 1, 200)
    broken["parts"][""]["raw"] = [
        {"error2": None, "bias2": None, "draws2": None, "cosine": None} for _ in range(3)
    ]
    one = verdict(
        outcome_of(design, lines | {broken["branch"]: broken}, 0.05), "floor", Measure.BIAS
    )
    assert (one.verdict, one.note) == (Verdict.CANNOT_BE_TOLD, "not finite")


def test_eighty_columns_hold_errors_and_verdicts(outcome: Outcome) -> None:
    stream = io.StringIO()
    print_outcome(outcome, Console(file=stream, width=80))
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    lines = [row.split() for row in shown.splitlines()]
    assert any(row[:2] == ["rceil", "0.046"] for row in lines)
    assert any(row[:3] == ["floor", "error", "x1.25"] for row in lines)
    assert "  linear.dgrad" in shown
    assert "to rceil, divided by Adam's root v" in shown
    assert "1.6 CPU minutes for 48 arms" in shown


def test_json_has_each_seed_group_and_part(outcome: Outcome) -> None:
    content = json.loads(json.dumps(record(outcome), allow_nan=False))
    whole, part = content["errors"]["adam"][:2]
    assert (whole["part"], part["part"]) == (None, "linear.dgrad")
    assert [*whole["groups"]] == GROUPS
    assert [*whole["error"]["by_seed"]] == [str(seed) for seed in SEEDS]
    assert whole["draws"]["mean"] is None
    assert content["verdicts"]["raw"]["error"][0]["verdict"] == "above"
    assert content["signal"]["raw"]["mean"] == pytest.approx(0.2)


def test_the_plan_counts_passes_and_knows_what_is_recorded(design: GradientDesign) -> None:
    plan = plan_of(design, design.branches, {}, 0.05)
    # Of a checkpoint 8 in fp32, and for each of three schemes 8 of the whole and of three products.
    assert plan["passes"] == 16 * 8 * (1 + 3 * 4)
    assert plan["cpu_s"] is None, "the runs recorded no speed"
    assert plan["smallest_ratios"] == {"floor": None, "same": None}
    known = plan_of(design, [], results(), 0.05)
    assert (known["passes"], known["cpu_s"]) == (0, 0)
    assert 1 < known["smallest_ratios"]["floor"] < 1.01


def test_the_figure_needs_a_unit(outcome: Outcome, design: GradientDesign, tmp_path: Path) -> None:
    files = draw_outcome(outcome, tmp_path / "figures")
    assert [file.name for file in files] == ["gradient.png", "gradient.pdf"]
    assert all(file.stat().st_size > 5000 for file in files)
    assert draw_outcome(outcome_of(design, {}, 0.05), tmp_path / "none") == []
