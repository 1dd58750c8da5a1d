"""What the ledger adds to the launchers' word, and what it does without one."""

from __future__ import annotations

import platform
from typing import NoReturn

import pytest

from quantexp.errors import RunError
from quantexp.launch.ledger.standing import standing, standings
from quantexp.runs.status import State
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun

HERE = platform.node()


def test_folder_that_does_not_say_is_unreadable_and_stops_no_other(make_run: MakeRun) -> None:
    broken, empty, whole = make_run("a-1"), make_run("b-2"), make_run("c-3", State.COMPLETED)
    broken.status.write_text("{")
    empty.status.unlink()
    found = standings([broken, empty, whole])
    assert [each.state for each in found] == [None, None, State.COMPLETED]
    assert found[0].reason.startswith("status.json, line 1: "), "its name stands beside it"
    assert found[1].reason == "it has no status.json: it was never started"


def test_run_without_its_configuration_is_broken_and_stops_no_other(make_run: MakeRun) -> None:
    broken, whole = make_run("a-1", State.COMPLETED), make_run("b-2", State.COMPLETED)
    broken.config.unlink()
    found = standings([broken, whole])
    assert [each.state for each in found] == [None, State.COMPLETED]
    assert found[0].reason == "broken: its config.yaml is gone; restore it, or delete the folder"


def test_completed_and_local_runs_ask_nothing(slurm: FakeSlurm, make_run: MakeRun) -> None:
    standings(
        [
            make_run("a-1", State.COMPLETED, submission=SUBMISSION, job_id="7_4"),
            make_run("b-2", host=HERE),
        ]
    )
    assert slurm.calls() == []


def test_run_of_a_launcher_that_is_not_installed_here_keeps_its_recorded_state(
    make_run: MakeRun,
) -> None:
    found = standing(make_run(launcher="pbs", job_id="12"))
    assert (found.state, found.alive) == (State.RUNNING, True)
    assert found.note is not None
    assert found.note.startswith(
        "its launcher was not queried: launcher.kind must be one of local, slurm, got 'pbs'"
    )


def test_launcher_that_fails_stops_no_other(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RunError("the scheduler is down")

    monkeypatch.setattr("quantexp_launchers.slurm.launcher.SlurmLauncher.standings", fail)
    submitted, whole = make_run("a-1", launcher="slurm"), make_run("b-2", State.COMPLETED)
    found = standings([submitted, whole])
    assert found[0].note == "its launcher was not queried: the scheduler is down"
    assert [each.state for each in found] == [State.RUNNING, State.COMPLETED]
