"""All folders of a sweep exist, with the state pending, before the first run starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.local import sweep as module
from quantexp_launchers.local.sweep import Place, prepare
from rich.console import Console

from quantexp.config.load import from_plain, read
from quantexp.errors import ConfigError, DataError
from quantexp.launch import attempt
from quantexp.launch.attempt import open_run
from quantexp.runs.lock import take_lock
from quantexp.runs.status import State, read_json, read_status, write_json
from quantexp.schema import Experiment

from .stand_in import Workers, output_of, put_status


@pytest.fixture(autouse=True)
def _no_device(workers: Workers) -> None:
    """Prepared runs start nothing."""


def test_every_folder_is_pending(make: Callable[..., Experiment], console: Console) -> None:
    sweep = prepare([(make(1), 0), (make(2), 1)], console)
    for item, seed, stage in zip(sweep.items, (1, 2), (0, 1), strict=True):
        assert item.run is not None
        status = read_status(item.run.status)
        assert status is not None
        assert (status.state, status.started) == (State.PENDING, None)
        assert read(item.run.config).training.seed == seed
        assert (item.place, item.stage) == (Place.WAITING, stage)
        assert from_plain(item.config) == read(item.run.config)


def test_commit_is_queried_once_and_is_in_every_provenance(
    make: Callable[..., Experiment], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def checkout() -> dict[str, object]:
        calls.append(1)
        return {"commit": "0123", "diff": ""}

    monkeypatch.setattr(module, "checkout", checkout)
    sweep = prepare([(make(1), 0), (make(2), 0)], console)
    assert calls == [1]
    assert len(sweep.items) == 2
    for item in sweep.items:
        assert item.run is not None
        assert read_json(item.run.provenance)["source"]["commit"] == "0123"


def test_completed_run_is_over(make: Callable[..., Experiment], console: Console) -> None:
    (item,) = prepare([(make(1), 0)], console).items
    assert item.run is not None
    put_status(item.run, State.COMPLETED)
    (item,) = prepare([(make(1), 0)], console).items
    assert item.completed
    assert item.outcome is not None
    assert item.outcome.skipped


def test_run_completed_by_other_versions_waits_with_a_message(
    make: Callable[..., Experiment], console: Console
) -> None:
    (item,) = prepare([(make(1), 0)], console).items
    assert item.run is not None
    put_status(item.run, State.COMPLETED)
    then = read_json(item.run.provenance)
    write_json(item.run.provenance, {**then, "quantexp": "0.0.1"})
    (item,) = prepare([(make(1), 0)], console).items
    assert item.place is Place.WAITING
    assert "bf16: completed before with other versions (quantexp 0.0.1 then" in output_of(console)


def test_run_in_use_keeps_its_folder_and_gives_the_reason(
    make: Callable[..., Experiment], console: Console
) -> None:
    (item,) = prepare([(make(1), 0)], console).items
    assert item.run is not None
    lock = take_lock(item.run)
    (again,) = prepare([(make(1), 0)], console).items
    os.close(lock)
    assert (again.place, again.run) == (Place.IN_USE, item.run)
    assert "is in use by another process" in again.reason


def test_run_in_a_scheduler_is_over_with_its_job_as_the_reason(
    make: Callable[..., Experiment], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([(make(1), 0)], console)
    monkeypatch.setattr(attempt, "_elsewhere", lambda *_: "job 12 is waiting")
    (item,) = prepare([(make(1), 0)], console).items
    assert item.place is Place.DONE
    assert (item.state, item.completed) == (State.PENDING, False)
    assert item.outcome is not None
    assert item.outcome.reason == "job 12 is waiting"


def test_run_without_data_is_over_and_the_others_are_not(
    make: Callable[..., Experiment], console: Console
) -> None:
    lacking = make(1)
    lacking.dataset.sample = False
    first, second = prepare([(lacking, 0), (make(2), 0)], console).items
    assert (first.run, first.place, first.state) == (None, Place.DONE, State.FAILED)
    assert "has no data" in first.reason
    assert second.place is Place.WAITING


def test_bug_in_one_point_is_its_reason_and_leaves_the_others_alone(
    make: Callable[..., Experiment],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def stumbles_once(experiment: Experiment, *arguments: Any, **options: Any) -> Any:
        if experiment.training.seed == 1:
            raise ZeroDivisionError("by nought")
        return open_run(experiment, *arguments, **options)

    monkeypatch.setattr(module, "open_run", stumbles_once)
    first, second = prepare([(make(1), 0), (make(2), 0)], console).items
    assert (first.place, first.reason) == (Place.DONE, "ZeroDivisionError: by nought")
    assert second.place is Place.WAITING
    assert "Traceback" in capfd.readouterr().err


def test_runs_below_two_roots_are_refused(
    make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    other = make(2)
    other.paths.root = str(tmp_path / "others")
    with pytest.raises(ConfigError, match=r"paths\.root is one for the whole sweep, got .*others"):
        prepare([(make(1), 0), (other, 0)], console)
    assert not (tmp_path / "runs").exists()


def test_data_error_of_a_point_is_its_reason(
    make: Callable[..., Experiment], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: object) -> None:
        raise DataError("no [data]")

    monkeypatch.setattr(attempt, "identity", lacks)
    (item,) = prepare([(make(1), 0)], console).items
    assert item.reason == "no [data]"
