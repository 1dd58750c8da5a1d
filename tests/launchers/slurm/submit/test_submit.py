"""From points to jobs, with a stand-in for SLURM: what is prepared, what is written when, and that all jobs are sent or
none.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm import submit
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.submit import planned, send, submit_run, submit_sweep
from rich.console import Console

from quantexp.config.load import read
from quantexp.launch.attempt import open_run
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status
from quantexp.schema import CaptureLevel, Experiment, LauncherConfig
from tests.recorded import status_of

from .conftest import QUIET, Point, Slurm


def test_all_runs_are_checked_and_prepared_before_any_is_sent(
    slurm: Slurm, point: Point, tmp_path: Path
) -> None:
    def look(batch: Batch) -> None:
        assert len(slurm.checked) == 2
        assert len(list((tmp_path / "runs").glob("llama*/config.yaml"))) == 3
        assert len(list((tmp_path / "runs" / "snapshots").iterdir())) == 1
        for task, run in enumerate(batch.runs):
            status = status_of(RunDir(run))
            assert (status.submission, status.task, status.job_id) == (batch.name, task, None)

    slurm.on_submit = look
    sent, arrays = send([point(1), point(2, time_min=5), point(3)], QUIET)
    assert [one.job_id for one in sent] == ["101_0", "102_0", "101_1"]
    assert [array.id for array in arrays] == ["101", "102"]
    for one in sent:
        assert status_of(one.run).job_id == one.job_id
        assert read(one.run.config).training.seed == one.experiment.training.seed


def test_chain_waits_for_one_array_after_another_and_later_stages_for_its_end(
    slurm: Slurm, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: list[str] = []

    def submit_script(text: str, file: Path, launcher: LauncherConfig) -> str:
        assert file.name == f"submission-{len(scripts) + 1}.sh"
        scripts.append(text)
        return str(200 + len(scripts))

    monkeypatch.setattr(submit, "submit_script", submit_script)
    _, (first, later) = send([point(1, chain=2), point(2, stage=1)], QUIET)
    assert (first.id, first.chained, first.last_id) == ("101", ("201", "202"), "202")
    dependencies = [re.findall("--dependency=(.*)", text)[0] for text in scripts]
    assert dependencies == ["afterany:101", "afterany:201"]
    assert all("#SBATCH --no-requeue\n" in text for text in scripts)
    assert json.loads((first.batch.folder / "chain.json").read_text()) == ["101", "201", "202"]
    assert later.batch.dependency == "afterok:202"


def test_submission_lists_its_runs_in_a_private_file(slurm: Slurm, point: Point) -> None:
    before = os.umask(0o022)
    try:
        send([point(1), point(2)], QUIET)
    finally:
        os.umask(before)
    (batch,) = slurm.sent
    for folder in (batch.folder, batch.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tasks = batch.folder / "tasks.json"
    assert stat.S_IMODE(tasks.stat().st_mode) == 0o600
    assert json.loads(tasks.read_text()) == {
        "runs": [str(run) for run in batch.runs],
        "snapshot": str(batch.snapshot),
        "umask": 0o022,
    }
    assert batch.umask == 0o022


@pytest.mark.parametrize(
    ("environment", "mode"), [({}, 0o755), ({"TOKEN": "t0ken-0f-n0b0dy"}, 0o700)]
)
def test_folder_whose_configuration_has_variables_is_private(
    slurm: Slurm, point: Point, environment: dict[str, str], mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        submit_sweep([point(environment=environment)], QUIET)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    (folder,) = (tmp_path / "runs").glob("llama*")
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    (listed,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert stat.S_IMODE(listed.stat().st_mode) == mode & 0o666
    assert "t0ken-0f-n0b0dy" not in (folder / "provenance.json").read_text()


def test_names_of_two_submissions_differ(slurm: Slurm, point: Point) -> None:
    for seed in (1, 2):
        send([point(seed)], QUIET)
    first, second = slurm.sent
    assert first.name != second.name
    assert first.name.startswith("quantexp-20")


def test_later_stage_waits_for_the_earlier_one(slurm: Slurm, point: Point) -> None:
    send([point(1, 1), point(2, 0), point(3, 1)], QUIET)
    assert [(batch.stage, batch.dependency) for batch in slurm.sent] == [
        (0, None),
        (1, "afterok:101"),
    ]


def test_sweep_beyond_the_limit_of_an_array_is_several_and_all_of_it_is_first(
    slurm: Slurm, point: Point
) -> None:
    points = [*(point(seed, 0) for seed in range(4)), point(9, 1, max_parallel=2)]
    sent, arrays = send(points, QUIET)
    assert [one.job_id for one in sent] == ["101_0", "101_1", "101_2", "102_0", "103_0"]
    assert [array.batch.dependency for array in arrays] == [None, None, "afterok:101:102"]
    for one, number in zip(sent, (0, 1, 2, 0, 0), strict=True):
        assert status_of(one.run).task == number


def test_limit_holds_over_all_arrays(slurm: Slurm, point: Point) -> None:
    send([point(n, time_min=n, max_parallel=1) for n in (1, 2, 3)], QUIET)
    assert [(batch.throttle, batch.dependency) for batch in slurm.sent] == [
        (1, None),
        (1, "afterany:101"),
        (1, "afterany:101:102"),
    ]


# Runs that need not be sent.


def waits(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Leave the run as another submitter that has sent it."""
    with open_run(experiment, "cpu", []) as (folder, _):
        status = status_of(folder.run)
        write_status(folder.run.status, replace(status, submission="q-9", task=4, job_id="90_4"))

    def live(_: RunDir, status: Status) -> str | None:
        return f"job {status.job_id} is waiting" if status.job_id == "90_4" else None

    monkeypatch.setattr(
        submit,
        "open_run",
        lambda *words, **keys: open_run(*words, **keys, job_lookup=live),  # type: ignore[misc]
    )
    return folder.run


def test_waiting_run_is_not_sent_again(
    slurm: Slurm, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waits(point(1)[0], monkeypatch)
    before = run.status.read_bytes()
    sent, _ = send([point(1), point(2)], QUIET)
    assert [(one.job_id, one.reason) for one in sent] == [
        (None, "job 90_4 is waiting"),
        ("101_0", ""),
    ]
    assert run.status.read_bytes() == before


def test_later_stage_waits_for_a_run_of_another_submitter(
    slurm: Slurm, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(point(1)[0], monkeypatch)
    send([point(1, 0), point(2, 1)], QUIET)
    assert [batch.dependency for batch in slurm.sent] == ["afterok:90_4"]


def test_completed_run_is_not_sent_and_nothing_waits_for_it(slurm: Slurm, point: Point) -> None:
    experiment, _ = point(1)
    experiment.capture = replace(experiment.capture, level=CaptureLevel.off)
    with open_run(experiment, "cpu", []) as (folder, _):
        completed = replace(
            status_of(folder.run),
            state=State.COMPLETED,
            iteration=8,
            finished="2026-01-02T00:00:00+00:00",
        )
        write_status(folder.run.status, completed)
    sent, arrays = send([(experiment, 0), point(2, 1)], QUIET)
    assert sent[0].reason.startswith("already completed 2026-01-02T")
    assert [array.batch.dependency for array in arrays] == [None]


def test_nothing_to_send_creates_no_submission(
    slurm: Slurm,
    point: Point,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    waits(point(1)[0], monkeypatch)
    assert submit_run(point(1)[0], Console(width=300)) == 0
    assert not slurm.sent
    assert not (tmp_path / "runs" / "submissions").exists()
    assert "not sent" in (output := capsys.readouterr().out)
    assert "job 90_4 is waiting" in output


def test_unreadable_earlier_attempt_is_reported(
    slurm: Slurm, point: Point, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run(point(1)[0], "cpu", []) as (folder, _):
        pass
    folder.run.status.write_text("{")
    send([point(1)], Console(width=300))
    assert "an earlier attempt cannot be read (" in capsys.readouterr().out


# Refusals.


# Sweeps.


def test_sweep_is_listed_before_it_is_sent_and_with_its_jobs_after(
    slurm: Slurm, point: Point, tmp_path: Path
) -> None:
    sweeps = tmp_path / "runs" / "sweeps"

    def rows() -> list[dict[str, Any]]:
        (file,) = sweeps.iterdir()
        runs = json.loads(file.read_text())["runs"]
        assert isinstance(runs, list)
        return runs

    def look(_: Batch) -> None:
        assert [row["job_id"] for row in rows()] == [None, None]

    slurm.on_submit = look
    submit_sweep([point(1), point(2, 1)], QUIET)
    assert [(row["job_id"], row["stage"], row["reason"]) for row in rows()] == [
        ("101_0", 0, ""),
        ("102_0", 1, ""),
    ]
    for row, seed in zip(rows(), (1, 2), strict=True):
        assert row["config"]["training"]["seed"] == seed
        assert (tmp_path / "runs" / row["run"] / "config.yaml").is_file()


# The plan.


def test_planned_batch_is_the_sent_one(slurm: Slurm, point: Point) -> None:
    experiment, _ = point(1, partition="gpu")
    sent, arrays = send([(experiment, 0)], QUIET)
    plan, real = planned(experiment, sent[0].run.root), arrays[0].batch
    assert plan.name == "quantexp-TIME-ID"
    assert replace(plan, name=real.name, folder=real.folder, umask=real.umask) == real
    assert plan.folder.parent == real.folder.parent
