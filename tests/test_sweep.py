"""A sweep goes on after a failure, and says and writes how each run ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quantexp.errors import ConfigError, DataError, RunError
from quantexp.execute import Outcome
from quantexp.paths import RunDir
from quantexp.schema import Experiment
from quantexp.status import State
from quantexp.sweep import run_sweep

QUIET = Console(quiet=True)
POINTS = ["training=fast", "quant=bf16,FA_mxfp8,linear_hifp8"]
METRICS = {"iteration": 8, "loss": 5.0, "tokens_per_s": 1.0, "memory_gb": 1.0}

Run = Callable[[Experiment], Outcome]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Callable[[Run], list[str]]:
    """Puts a function in the place of running one experiment; returns the schemes as they ran."""

    def put(stand_in: Run) -> list[str]:
        ran: list[str] = []

        def execute(experiment: Experiment, _: Console) -> Outcome:
            ran.append(str(experiment.quant.name))
            return stand_in(experiment)

        monkeypatch.setattr("quantexp.sweep.execute", execute)
        return ran

    return put


def ended(experiment: Experiment, state: State = State.COMPLETED, **values: Any) -> Outcome:
    run = RunDir(Path("runs") / f"run_of_{experiment.quant.name}")
    return Outcome(experiment, run, state, metrics=METRICS, **values)


def ledger() -> list[dict[str, object]]:
    (file,) = Path("runs/sweeps").glob("*.json")
    rows = json.loads(file.read_text())["runs"]
    assert isinstance(rows, list)
    return rows


def test_every_point_runs_in_order_and_is_listed(runs: Callable[[Run], list[str]]) -> None:
    ran = runs(lambda e: ended(e, skipped=e.quant.name == "bf16"))
    assert run_sweep(POINTS, None, QUIET) == 0
    assert ran == ["bf16", "FA_mxfp8", "linear_hifp8"]
    assert [(r["run"], r["state"], r["skipped"]) for r in ledger()] == [
        ("run_of_bf16", "completed", True),
        ("run_of_FA_mxfp8", "completed", False),
        ("run_of_linear_hifp8", "completed", False),
    ]


def test_failed_run_does_not_stop_the_others(runs: Callable[[Run], list[str]]) -> None:
    def run(experiment: Experiment) -> Outcome:
        if experiment.quant.name == "bf16":
            return ended(experiment, State.FAILED, reason="loss nan")
        return ended(experiment)

    ran = runs(run)
    assert run_sweep(POINTS, None, QUIET) == 1
    assert len(ran) == 3
    assert next((r["state"], r["reason"]) for r in ledger()) == ("failed", "loss nan")


def test_run_that_cannot_start_is_listed_with_its_reason(
    runs: Callable[[Run], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(experiment: Experiment) -> Outcome:
        if experiment.quant.name == "FA_mxfp8":
            raise DataError("no [data]")
        return ended(experiment)

    ran = runs(run)
    assert run_sweep(POINTS, None, Console(width=160)) == 1
    assert len(ran) == 3
    assert "llama32-1b wikipedia FA_mxfp8: no [data]" in capsys.readouterr().out
    assert ledger()[-1] == {
        "run": None,
        "state": "failed",
        "skipped": False,
        "reason": "llama32-1b wikipedia FA_mxfp8: no [data]",
    }


def test_sweep_whose_runs_all_fail_to_start_is_written_too(
    runs: Callable[[Run], list[str]],
) -> None:
    def run(experiment: Experiment) -> Outcome:
        raise DataError("no data")

    runs(run)
    assert run_sweep(POINTS, None, QUIET) == 1
    assert len(ledger()) == 3


def test_sweeps_list_that_cannot_be_written_is_a_clean_error(
    runs: Callable[[Run], list[str]],
) -> None:
    def run(experiment: Experiment) -> Outcome:
        raise RunError("the run folder cannot be written")

    runs(run)
    Path("file").write_text("")
    with pytest.raises(
        RunError, match=r"the sweep's list of runs cannot be written to .*file/runs"
    ):
        run_sweep([*POINTS, "paths.root=file/runs"], None, QUIET)


def test_bug_in_a_run_keeps_its_traceback_and_the_others_their_table(
    runs: Callable[[Run], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    def run(experiment: Experiment) -> Outcome:
        if experiment.quant.name == "bf16":
            raise ZeroDivisionError("by nought")
        return ended(experiment)

    ran = runs(run)
    assert run_sweep(POINTS, None, QUIET) == 1
    assert len(ran) == 3
    assert "Traceback" in capfd.readouterr().err
    record = json.loads(next(Path("runs/sweeps").glob("*.json")).read_text())
    assert any("ZeroDivisionError: by nought" in run["reason"] for run in record["runs"])


def test_bad_last_point_means_that_nothing_ran(runs: Callable[[Run], list[str]]) -> None:
    ran = runs(ended)
    with pytest.raises(ConfigError, match=r"training\.seed must be at least 0, got -1"):
        run_sweep(["training=fast", "training.seed=1,2,-1"], None, QUIET)
    assert not ran
    assert not Path("runs").exists()


def test_interrupted_run_ends_the_sweep(runs: Callable[[Run], list[str]]) -> None:
    ran = runs(lambda e: ended(e, State.CANCELLED, reason="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(POINTS, None, QUIET)
    assert ran == ["bf16"]
    assert [r["state"] for r in ledger()] == ["cancelled"]


def test_dry_points_are_shown_and_not_run(
    runs: Callable[[Run], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = runs(ended)
    assert run_sweep([*POINTS, "dry_run=true"], None, Console(width=160)) == 0
    assert not ran
    assert capsys.readouterr().out.count("precision map") == 3
