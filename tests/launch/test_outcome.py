"""What a run folder tells of a run that ended."""

from __future__ import annotations

import json

import pytest

from quantexp.launch.outcome import outcome
from quantexp.launch.pace import pace
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
