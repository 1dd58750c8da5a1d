"""What the ledger adds to the launchers' answers, and what it does without one."""

from __future__ import annotations

import platform
from typing import NoReturn

import pytest

from quantexp.errors import RunError
from quantexp.launch.ledger.standing import standing, standings
from quantexp.runs.status import State
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun

HERE = platform.node()


def test_folder_without_a_status_is_unreadable_and_does_not_affect_the_others(
    make_run: MakeRun,
) -> None:
    broken, empty, whole = make_run("a-1"), make_run("b-2"), make_run("c-3", State.COMPLETED)
    broken.status.write_text("{")
    empty.status.unlink()
    entries = standings([broken, empty, whole])
    assert [each.state for each in entries] == [None, None, State.COMPLETED]
    assert entries[0].reason.startswith("status.json, line 1: "), "its name stands beside it"
    assert entries[1].reason == "it has no status.json: it was never started"


def test_run_without_its_configuration_is_broken_and_does_not_affect_the_others(
    make_run: MakeRun,
) -> None:
    broken, whole = make_run("a-1", State.COMPLETED), make_run("b-2", State.COMPLETED)
    broken.config.unlink()
    entries = standings([broken, whole])
    assert [each.state for each in entries] == [None, State.COMPLETED]
    assert entries[0].reason == "broken: its config.yaml is gone; restore it, or delete the folder"


def test_completed_and_local_runs_need_no_query(slurm: FakeSlurm, make_run: MakeRun) -> None:
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
    entry = standing(make_run(launcher="pbs", job_id="12"))
    assert (entry.state, entry.alive) == (State.RUNNING, True)
    assert entry.note is not None
    assert entry.note.startswith(
        "its launcher was not queried: launcher.kind must be one of local, slurm, got 'pbs'"
    )


def test_failing_launcher_does_not_affect_the_others(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RunError("the scheduler is down")

    monkeypatch.setattr("quantexp_launchers.slurm.launcher.SlurmLauncher.standings", fail)
    submitted, whole = make_run("a-1", launcher="slurm"), make_run("b-2", State.COMPLETED)
    entries = standings([submitted, whole])
    assert entries[0].note == "its launcher was not queried: the scheduler is down"
    assert [each.state for each in entries] == [State.RUNNING, State.COMPLETED]
