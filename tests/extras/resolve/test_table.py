"""The tables, JSON and figure of `quantexp branch`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.extras.resolve.design import Arm, Base, Design
from quantexp.extras.resolve.figure import draw_outcome
from quantexp.extras.resolve.judging import Judgement, judged
from quantexp.extras.resolve.outcome import Measure, Outcome
from quantexp.extras.resolve.table import in_units, print_outcome, record
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

GAPS = {
    "linear_mxfp8": [1e-4, -1.2e-4, 0.8e-4, -0.7e-4, 0.4e-4, -0.5e-4],
    "linear_mxfp4": [0.0030, 0.0031, 0.0029, 0.0032, 0.0028, 0.0030],
}


def drafts(gaps: dict[str, list[float]]) -> list[Judgement]:
    return [
        Judgement(name, steps, dict(enumerate((steps / 50 * v for v in values), 1)), 12)
        for name, values in gaps.items()
        for steps in (10, 50)
    ]


@pytest.fixture
def outcome(tiny: Callable[..., Experiment], tmp_path: Path) -> Outcome:
    bases = tuple(Base(RunDir(tmp_path / str(s)), tiny(f"training.seed={s}")) for s in range(1, 7))
    arms = (Arm("bf16", bases[0].experiment.quant),)
    design = Design(tmp_path, bases, (200, 400), arms, (10, 50), 512, (), "code")
    both = dict.fromkeys(Measure, judged(drafts(GAPS), 1e-3))
    return Outcome(design, 1e-3, both, judged(drafts({"bf16 chaos": [0.0] * 6}), 1e-3), 90.0)


@pytest.mark.parametrize(
    ("nats", "shown"), [(0.00025, "+2.50"), (-3e-6, "-0.03"), (0.0178, "+178")]
)
def test_small_numbers_are_in_small_units(nats: float, shown: str) -> None:
    assert in_units(nats) == shown


def test_eighty_columns_hold_every_verdict(outcome: Outcome) -> None:
    stream = io.StringIO()
    print_outcome(outcome, Console(file=stream, width=80))
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    lines = [line.split() for line in shown.splitlines()]
    assert ["linear_mxfp4", "50", "+30.00", "+28.52", "to", "+31.48"] in [x[:6] for x in lines]
    assert shown.count("above") >= 4
    assert shown.count("equivalent") >= 4
    assert "held-out loss with nothing quantised, to bf16" in shown
    assert "1.5 CPU minutes" in shown


def test_json_has_each_seed_and_every_number(outcome: Outcome) -> None:
    content = json.loads(json.dumps(record(outcome)))
    row = content["working_loss"][3]
    assert (row["scheme"], row["steps"], row["verdict"]) == ("linear_mxfp4", 50, "above")
    assert list(row["gaps"].values()) == GAPS["linear_mxfp4"]
    low, high = row["interval"]
    assert low < row["difference"] < high
    assert content["controls"][0]["difference"] == 0


def test_the_figure_needs_a_unit(outcome: Outcome, tmp_path: Path) -> None:
    files = draw_outcome(outcome, tmp_path / "figures")
    assert [file.name for file in files] == ["branch.png", "branch.pdf"]
    assert all(file.stat().st_size > 5000 for file in files)
    empty = Outcome(outcome.design, 1e-3, {each: [] for each in Measure}, [], 0.0)
    assert draw_outcome(empty, tmp_path / "none") == []
