"""A sweep's sweep lists the state of its runs and is enough to continue the sweep."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from quantexp_launchers.local.standing import waiting_in
from quantexp_launchers.local.sweep import Item, Place, Sweep, prepare, read_list
from rich.console import Console

from quantexp.config.load import from_plain, read
from quantexp.errors import RunError
from quantexp.runs.lock import is_held, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_json, read_status, write_json, write_status
from quantexp.schema import Experiment

from .stand_in import Workers


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
