"""Evaluations are jobs like any run: an array has them, and the same command shows their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from tests.conftest import TINY

from .cluster import Cluster
from .launched import SMALL, until_state

NOT_TRAINED = ("training.iterations", "training.warmup_iterations")


@pytest.mark.slow
def test_evaluations_of_two_schemes_are_two_tasks(
    plain: Cluster,
    run_tiny: Callable[..., RunDir],
    cache: Path,
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = run_tiny("capture=off", "checkpoint.at_end=true")
    words = [word for word in TINY if word.partition("=")[0] not in NOT_TRAINED]
    words += [f"training.start_from={trained.root}@2", "evaluation.samples=4", *SMALL]
    words += [f"paths.cache={cache}", "dataset.split='50,50,0'", "quant=bf16,linear_mxfp4"]
    assert main(["evaluate", "-m", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err.endswith(
        "quantexp: 2 of 2 evaluations have no results yet; the same command shows them when their jobs have ended\n"
    )
    runs = [RunDir(folder) for folder in sorted((in_tmp / "runs").glob("*_evaluated-*"))]
    assert len(runs) == 2
    for run in runs:
        until_state(run, State.COMPLETED, State.FAILED, within_s=240)
    assert main(["evaluate", "-m", *words, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [one["evaluation"]["scheme"]["tokens"] for one in records] == [4 * 64] * 2
    assert records[0]["evaluation"]["scheme"]["difference"] == 0
    assert records[1]["evaluation"]["scheme"]["difference"] != 0
