"""What a run folder tells of a run that ended."""

from __future__ import annotations

import json

import pytest

from quantexp.launch.outcome import Pace, outcome, pace
from quantexp.runs.status import State, Status, write_status
from quantexp.schema import Experiment
from tests.launchers.slurm.conftest import MakeRun

OVERFLOW = {"loss": 5.0, "skipped": True, "loss_scale": 2.0**40}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([OVERFLOW], "the only step left out: "),
        ([OVERFLOW] * 3, "all of the last 3 steps left out: "),
        ([OVERFLOW, OVERFLOW | {"skipped": False}], ""),
        ([OVERFLOW, OVERFLOW | {"loss_scale": 1.0}], ""),
        ([], ""),
    ],
)
def test_a_run_in_which_fp16_overflowed_in_every_step_says_so(
    make_run: MakeRun, lines: list[dict[str, object]], words: str
) -> None:
    run, status = make_run(), Status(State.COMPLETED, iteration=len(lines))
    write_status(run.status, status)
    run.metrics.write_text(
        "".join(json.dumps({"iteration": i, **line}) + "\n" for i, line in enumerate(lines, 1))
    )
    if words:
        words += "gradients overflow fp16 at a loss scale of 1.1e+12 (training.initial_loss_scale)"
    assert outcome(Experiment(), run).left_out == words
    assert pace(run, status).without_a_step == words


def line(iteration: int, step_time_s: float | None, loss: float | None = 2.0) -> str:
    speed = {"step_time_s": step_time_s, "tokens_per_s": 64.0}
    return json.dumps({"iteration": iteration, "loss": loss, **speed}) + "\n"


def test_time_left_is_at_the_median_of_the_iterations_after_the_first(make_run: MakeRun) -> None:
    run = make_run()
    run.metrics.write_text(line(1, 90.0) + line(2, 2.0) + line(3, 3.0))
    assert pace(run, Status(iteration=3, iterations=8)) == Pace(2.0, 64.0, 12.5)


def test_nonfinite_or_truncated_values_are_none(make_run: MakeRun) -> None:
    run = make_run()
    run.metrics.write_text(line(1, 2.0) + line(2, 2.0, loss=None) + '{"loss": 1.5, "step')
    assert pace(run, Status(iteration=2, iterations=8)) == Pace(None, 64.0, 12.0)
    run.metrics.write_text('{"iteration": 1}\n' + line(2, None))
    assert pace(run, Status(iteration=2, iterations=8)) == Pace(2.0, 64.0, None)


def test_run_without_metrics_has_no_pace(make_run: MakeRun) -> None:
    assert pace(make_run(), Status()) == Pace()


def test_metrics_that_end_before_the_status_are_named(make_run: MakeRun) -> None:
    run = make_run()
    assert pace(run, Status(iteration=3)).early_end == "metrics.jsonl ends at iteration 0 of 3"
    run.metrics.write_text(line(1, 2.0) + line(2, 2.0))
    assert pace(run, Status(iteration=3)).early_end == "metrics.jsonl ends at iteration 2 of 3"
    assert pace(run, Status(iteration=1)).early_end == "", "a line is written before its status"
