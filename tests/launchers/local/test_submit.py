"""A sweep from its points to its table, file and exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.local import submit
from quantexp_launchers.local.submit import detach_run, run_points
from quantexp_launchers.local.sweep import Sweep, prepare
from rich.console import Console

from quantexp.errors import ConfigError, DataError, RunError, RunInUseError
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_json
from quantexp.schema import Experiment

from .stand_in import Workers, is_interrupted, output_of, put_status


def ledger(root: Path) -> list[dict[str, Any]]:
    (file,) = (root / "sweeps").glob("*.json")
    rows = read_json(file)["runs"]
    assert isinstance(rows, list)
    return rows


def test_sweep_ends_with_its_table_and_its_list(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    points = [(make(scheme=name), 0) for name in ("bf16", "linear_mxfp8")]
    assert run_points(points, console) == 0
    text = output_of(console)
    assert text.index("completed  bf16") < text.index("2 runs")
    assert [(row["state"], row["skipped"], row["reason"]) for row in ledger(tmp_path / "runs")] == [
        ("completed", False, ""),
        ("completed", False, ""),
    ]


def test_one_failure_sets_the_exit_code(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    workers.does[1] = lambda run, _: put_status(run, State.FAILED, "loss nan")
    assert run_points([(make(1), 0), (make(2), 0)], console) == 1
    assert [row["state"] for row in ledger(tmp_path / "runs")] == ["failed", "completed"]
    assert ledger(tmp_path / "runs")[0]["reason"] == "loss nan"


def test_run_that_cannot_start_is_in_the_table_and_the_list_with_its_reason(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    lacking = make(1)
    lacking.dataset.sample = False
    assert run_points([(lacking, 0), (make(2), 0)], console) == 1
    words = "dataset=wikipedia has no data: give"
    assert f"llama32-1b wikipedia bf16 seed=1: {words}" in output_of(console)
    lines = output_of(console).splitlines()
    assert lines[0].startswith(f"failed     bf16 seed=1: {words}"), "told at once"
    row = ledger(tmp_path / "runs")[0]
    assert (row["run"], row["state"]) == (None, "failed")
    assert row["reason"].startswith("dataset=wikipedia has no data")
    assert workers.started == [2]


def test_sweep_of_which_no_run_can_start_is_written_too(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(*_: object) -> None:
        raise DataError("no data")

    monkeypatch.setattr("quantexp.launch.attempt.identity", lacks)
    assert run_points([(make(1), 0), (make(2), 0)], console) == 1
    assert [row["reason"] for row in ledger(tmp_path / "runs")] == ["no data"] * 2


def test_list_that_cannot_be_written_is_a_clean_error(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match=r"the sweep's list of runs cannot be written to .*/runs/sw"):
        run_points([(make(1), 0)], console)
    assert workers.started == []


def test_signal_ends_the_running_run_and_the_table_is_still_printed(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    workers.does[1] = is_interrupted
    with pytest.raises(KeyboardInterrupt):
        run_points([(make(seed), 0) for seed in (1, 2, 3)], console)
    assert [row["state"] for row in ledger(tmp_path / "runs")] == [
        "cancelled",
        "pending",
        "pending",
    ]
    assert "3 runs" in output_of(console)
    assert "2 pending: its sweep was interrupted before it started" in output_of(console)
    assert output_of(console).count("stopping: the run saves what it has, 20 s at most") == 1
    (file,) = (tmp_path / "runs" / "sweeps").glob("*.json")
    assert output_of(console).splitlines()[-2:] == [
        "3 of 3 runs are left. To run them, each from its last checkpoint:",
        f"  quantexp resume {file}",
    ]


def test_failed_run_of_an_interrupted_sweep_is_left_to_retry(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    def fails(run: RunDir, on_poll: Callable[[], None]) -> None:
        put_status(run, State.FAILED, "loss nan")

    workers.does |= {1: fails, 2: is_interrupted}
    with pytest.raises(KeyboardInterrupt):
        run_points([(make(seed), 0) for seed in (1, 2, 3)], console)
    (file,) = (tmp_path / "runs" / "sweeps").glob("*.json")
    assert output_of(console).splitlines()[-4:] == [
        "2 of 3 runs are left. To run them, each from its last checkpoint:",
        f"  quantexp resume {file}",
        "1 failed. To run them again:",
        f"  quantexp retry {file}",
    ]


def test_too_small_machine_is_reported_before_any_folder_is_created(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"launcher\.max_parallel=5 needs a core for each run"):
        run_points([(make(1, max_parallel=5), 0)], console)
    assert not (tmp_path / "runs").exists()


def test_points_that_differ_in_detach_are_refused(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"launcher\.detach is one for the whole sweep"):
        run_points([(make(1, detach=True), 0), (make(2), 0)], console)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> list[Sweep]:
    """The sheets that would go on in the background."""
    sheets: list[Sweep] = []
    monkeypatch.setattr(submit, "go_on_in_background", lambda sweep, _: sheets.append(sweep))
    return sheets


def test_detached_sweep_is_prepared_and_the_command_does_not_wait_for_it(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    detached: list[Sweep],
) -> None:
    points = [(make(seed, detach=True), 0) for seed in (1, 2)]
    assert run_points(points, console) == 0
    assert [item.run is not None for item in detached[0].items] == [True, True]
    assert workers.started == []


def test_nothing_goes_to_the_background_if_no_run_is_left(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    detached: list[Sweep],
) -> None:
    run_points([(make(1), 0)], console)
    assert "completed  bf16" in output_of(console)
    assert "final loss" not in output_of(console), "a table of one row says nothing more"
    assert run_points([(make(1, detach=True), 0)], console) == 0
    assert detach_run(make(1, detach=True), console) == 0
    assert not detached
    assert "skipped" in output_of(console)
    assert "already completed" in output_of(console)


def test_detached_run_that_is_in_use_is_refused(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    detached: list[Sweep],
) -> None:
    (item,) = prepare([(make(1), 0)], console).items
    assert item.run is not None
    lock = take_lock(item.run)
    with pytest.raises(RunInUseError, match="is in use by another process; wait for it, or stop"):
        detach_run(make(1, detach=True), console)
    os.close(lock)
    assert not detached


def test_detached_run_that_is_in_a_scheduler_is_refused(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    detached: list[Sweep],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare([(make(1), 0)], console)
    monkeypatch.setattr("quantexp.launch.attempt._elsewhere", lambda *_: "job 12 is waiting")
    with pytest.raises(RunInUseError, match="is in use: job 12 is waiting"):
        detach_run(make(1, detach=True), console)
    assert not detached


def test_detached_run_that_cannot_start_is_refused(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    detached: list[Sweep],
) -> None:
    lacking = make(1, detach=True)
    lacking.dataset.sample = False
    with pytest.raises(RunError, match="dataset=wikipedia has no data"):
        detach_run(lacking, console)
    assert not detached


def test_detached_run_goes_on_in_the_background(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    detached: list[Sweep],
) -> None:
    assert detach_run(make(1, detach=True), console) == 0
    assert len(detached[0].items) == 1


def quick(experiment: Experiment) -> tuple[Experiment, int]:
    experiment.analysis.auto = "quick"
    return experiment, 0


def pages(root: Path) -> list[Path]:
    return sorted((root / "sweeps").glob("*.html"))


@pytest.mark.parametrize("max_parallel", [1, 2])
def test_sweep_ends_with_the_report_of_its_runs_beside_its_list(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    tmp_path: Path,
    max_parallel: int,
) -> None:
    points = [
        quick(make(scheme=name, max_parallel=max_parallel)) for name in ("bf16", "linear_mxfp8")
    ]
    assert run_points(points, console) == 0
    (page,) = pages(tmp_path / "runs")
    (listing,) = (tmp_path / "runs" / "sweeps").glob("*.json")
    assert page.stem == listing.stem
    picture = page.with_suffix(".png")
    assert output_of(console).splitlines()[-2:] == [f"report  {page}", f"picture {picture}"]
    assert picture.is_file()
    text = page.read_text()
    assert "<h2>bf16</h2>" in text
    assert "<h2>linear_mxfp8</h2>" in text


def test_skipped_runs_get_their_missing_drawings_and_are_in_the_sweeps_report(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    assert run_points([(make(1), 0), (make(2), 0)], console) == 0
    assert pages(tmp_path / "runs") == []
    assert not list((tmp_path / "runs").glob("*/report.html"))
    assert run_points([quick(make(seed)) for seed in (1, 2, 3)], console) == 0
    assert workers.started == [1, 2, 3]
    (page,) = pages(tmp_path / "runs")
    assert all(f"<h2>bf16 seed {seed}</h2>" in page.read_text() for seed in (1, 2, 3))
    drawn = sorted((tmp_path / "runs").glob("*/report.html"))
    assert len(drawn) == 2, "of the third its worker would have"
    assert all((report.parent / "figures" / "quick_analysis.png").is_file() for report in drawn)


def test_detached_run_that_is_skipped_is_drawn(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    assert run_points([(make(1), 0)], console) == 0
    assert detach_run(quick(make(1, detach=True))[0], console) == 0
    (report,) = (tmp_path / "runs").glob("*/report.html")
    assert str(report) in output_of(console).replace("\n", "").replace(" ", "")


def test_one_run_alone_has_its_own_report_only(
    workers: Workers, make: Callable[..., Experiment], console: Console, tmp_path: Path
) -> None:
    assert run_points([quick(make(1))], console) == 0
    assert pages(tmp_path / "runs") == []


def test_report_that_cannot_be_written_is_mentioned_and_changes_nothing(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RunError("no room")

    monkeypatch.setattr("quantexp.analysis.report.write.write_report", refuse)
    assert run_points([(make(1), 0)], console) == 0
    assert run_points([quick(make(seed)) for seed in (1, 2)], console) == 0
    text = output_of(console)
    assert " was not drawn: no room" in text
    assert re.search(r"\.html was not written; quantexp report .*\.json: no room", text)


def test_bug_in_drawing_keeps_its_traceback_and_changes_nothing(
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("quantexp.analysis.report.write.write_report", fail)
    assert run_points([quick(make(seed)) for seed in (1, 2)], console) == 0
    assert "by nothing" in output_of(console)
    assert "Traceback" in capsys.readouterr().err
