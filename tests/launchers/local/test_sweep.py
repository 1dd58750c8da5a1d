"""A sweep's folders exist before its first run starts; its list has the state of its runs and is enough to continue."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.local import sweep as module
from quantexp_launchers.local.standing import waiting_in
from quantexp_launchers.local.sweep import Item, Place, Sweep, prepare, read_list
from rich.console import Console

from quantexp.config.load import from_plain, read
from quantexp.errors import ConfigError, RunError
from quantexp.launch.attempt import open_run
from quantexp.runs.lock import is_held, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_json, read_status, write_json, write_status
from quantexp.schema import Experiment

from .stand_in import Workers, output_of, put_status

pytestmark = pytest.mark.usefixtures("workers")  # prepared runs start nothing


@pytest.fixture
def sweep(make: Callable[..., Experiment], workers: Workers, console: Console) -> Sweep:
    return prepare([(make(1), 0), (make(2), 1)], console)


def test_file_lists_the_runs_with_their_configurations(sweep: Sweep) -> None:
    sweep.write()
    content = read_json(sweep.files.listing)
    assert sweep.files.listing.parent == sweep.root / "sweeps"
    assert sweep.files.listing.name.startswith(sweep.started[:10].replace("-", "") + "_")
    assert content["pid"] == os.getpid()
    assert content["finished"] is None
    assert [(row["state"], row["stage"]) for row in content["runs"]] == [
        ("pending", 0),
        ("pending", 1),
    ]
    for row in content["runs"]:
        folder = sweep.root / row["run"]
        assert from_plain(row["config"]) == read(folder / "config.yaml")


def test_sheet_is_read_as_it_was_written(sweep: Sweep) -> None:
    sweep.source = {
        "commit": "0" * 40,
        "diff": "--- a\n+++ b\n",
    }  # not that of this checkout, which may hold secrets
    sweep.write()
    again = read_list(sweep.files.listing)
    assert (again.root, again.started, again.files) == (sweep.root, sweep.started, sweep.files)
    assert (again.command, again.source) == (sweep.command, sweep.source)
    for item, before in zip(again.items, sweep.items, strict=True):
        assert (item.run, item.stage, item.label) == (before.run, before.stage, before.label)
        assert item.place is Place.WAITING
        assert before.run is not None
        assert item.experiment == read(before.run.config)


def test_sheet_is_locked_for_as_long_as_a_process_works_through_it(sweep: Sweep) -> None:
    first, second = (item.run for item in sweep.items)
    assert first is not None
    assert second is not None
    assert not is_held(sweep.files.lock)
    with sweep.locked():
        assert is_held(sweep.files.lock)
        assert read_json(sweep.files.listing)["finished"] is None
        assert set(waiting_in(sweep.root)) == {first.root.name, second.root.name}
        assert set(waiting_in(sweep.root).values()) == {sweep.files.listing.stem}
        sweep.items[0].place = Place.DONE
        sweep.write()
        assert set(waiting_in(sweep.root)) == {second.root.name}
    assert not is_held(sweep.files.lock)
    assert not sweep.files.lock.exists()
    assert read_json(sweep.files.listing)["finished"] is not None


@pytest.mark.parametrize("content", [{}, {"runs": [{"config": {}}]}, []])
def test_file_that_is_no_sheet_is_refused(tmp_path: Path, content: object) -> None:
    write_json(tmp_path / "x.json", content)
    with pytest.raises(RunError, match=r"x\.json is not a sweep of this version: "):
        read_list(tmp_path / "x.json")


def test_folder_that_cannot_be_written_is_named(sweep: Sweep) -> None:
    (sweep.root / "sweeps").write_text("")
    for use in (sweep.write, lambda: sweep.locked().__enter__()):
        with pytest.raises(
            RunError, match=r"the sweep's list of runs cannot be written to .*runs/sweeps: .*; set "
        ):
            use()


def reason(run: RunDir) -> str:
    status = read_status(run.status)
    assert status is not None
    return status.reason


def prepared(sweep: Sweep) -> tuple[Item, RunDir]:
    run = sweep.items[0].run
    assert run is not None
    return sweep.items[0], run


def test_waiting_run_gets_the_reason(sweep: Sweep) -> None:
    item, run = prepared(sweep)
    item.hold_back("for a reason")
    assert reason(run) == "for a reason"


@pytest.mark.parametrize(
    "status", [Status(State.COMPLETED), Status(State.PENDING, started="2026-01-01")]
)
def test_run_that_has_started_is_left_alone(sweep: Sweep, status: Status) -> None:
    item, run = prepared(sweep)
    write_status(run.status, status)
    item.hold_back("for a reason")
    assert reason(run) == ""


def test_run_of_another_process_is_left_alone(sweep: Sweep) -> None:
    item, run = prepared(sweep)
    lock = take_lock(run)
    item.hold_back("for a reason")
    os.close(lock)
    assert reason(run) == ""


def test_missing_folder_is_not_created_again(sweep: Sweep) -> None:
    item, run = prepared(sweep)
    run.root.rename(sweep.root / "elsewhere")
    item.hold_back("for a reason")
    assert not run.root.exists()


def test_reason_that_a_full_disk_refuses_stops_no_other_run(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, run = prepared(sweep)

    def write(file: Path, status: Status) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quantexp_launchers.local.sweep.write_status", write)
    item.hold_back("for a reason")
    assert reason(run) == ""


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
