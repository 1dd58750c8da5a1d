"""The state of the page follows the folder, and a page is sent what has changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.side import read_side
from quantexp.errors import RunError
from quantexp.extras.forensics.watch import folder as room
from quantexp.extras.forensics.watch.folder import MOST, Dossiers, FolderWatch
from quantexp.runs.dossiers import DOSSIER, Dossier, Trigger, folder_of, write_dossier
from quantexp.runs.find import Missing, Scope, scope
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import State, read_status, write_json, write_status
from tests.analysis.compare.runs import Runs
from tests.analysis.report.captured import captured

from .conftest import ledger

Watched = Callable[[], FolderWatch]


def content(watch: FolderWatch) -> dict[str, Any]:
    assert watch.refresh()
    found: dict[str, Any] = watch.state("", 0)["content"]
    return found


def row_of(watch: FolderWatch, label: str) -> dict[str, Any]:
    (row,) = [row for row in content(watch)["runs"] if row["label"] == label]
    return dict(row)


def advance(run: RunDir, iterations: range, loss: float = 3.0) -> None:
    with run.metrics.open("a") as stream:
        stream.writelines(json.dumps({"iteration": i, "loss": loss}) + "\n" for i in iterations)


def test_rows_have_the_labels_and_gaps_of_a_comparison(runs: Runs, watched: Watched) -> None:
    folders = [
        runs.add("bf16", [6.0, 5.0, 4.0, 3.0], seed=1),
        runs.add("bf16", [6.5, 5.5, 4.5, 3.5], seed=2),
        runs.add("linear_mxfp4", [6.1, 5.2, 4.3, 3.4], seed=1),
        runs.add("linear_mxfp4", [6.6, 5.8, 4.8, 3.6], seed=2),
    ]
    expected = compare([read_side(run) for run in folders])
    rows = content(watched())["runs"]
    assert [row["label"] for row in rows] == [row.label for row in expected.rows]
    for shown, row in zip(rows, expected.rows, strict=True):
        if not row.is_baseline:
            assert row.gap is not None
            assert (shown["gap"], shown["late_gap"]) == (
                f"{row.gap.last:+.4f}",
                f"{row.gap.late:+.4f}",
            )
    assert [row["gap"] for row in rows] == ["", "", "+0.4000", "+0.1000"]
    assert [row["is_baseline"] for row in rows] == [True, True, False, False]
    assert rows[0]["iteration"] == "4 / 4"
    assert (rows[2]["loss"], rows[2]["proof"], rows[2]["tokens_per_s"]) == (
        "3.4000",
        "proved",
        "50",
    )
    assert len({(row["colour"], tuple(row["dash"])) for row in rows}) == 4, "no two look alike"


def test_a_run_that_advances_changes_its_line_and_its_gap(runs: Runs, watched: Watched) -> None:
    bf16 = runs.add("bf16", [6.0, 5.0], state=State.RUNNING)
    mxfp4 = runs.add("linear_mxfp4", [6.5, 5.6], state=State.RUNNING)
    watch = watched()
    assert row_of(watch, "linear_mxfp4")["gap"] == "+0.6000"
    version = watch.state("", 0)["version"]
    assert watch.state(watch.server, version)["series"] == {}
    assert "content" not in watch.state(watch.server, version)
    advance(mxfp4, range(3, 5), 4.0)
    watch.refresh()
    answer = watch.state(watch.server, version)
    assert len(answer["series"]) == 1
    (line,) = answer["series"].values()
    assert line["loss"]["points"][0] == [1, 2, 3, 4]
    assert line["gap"]["points"] == [[1, 2], [0.5, 0.6]]
    version = answer["version"]
    advance(bf16, range(3, 5), 3.5)
    watch.refresh()
    answer = watch.state(watch.server, version)
    assert sorted(line["label"] for line in answer["series"].values()) == ["bf16", "linear_mxfp4"]
    assert row_of(watch, "linear_mxfp4")["gap"] == "+0.5000"


def test_runs_of_different_progress_are_no_mismatch_and_other_data_order_is(
    runs: Runs, watched: Watched
) -> None:
    runs.add("bf16", [6.0, 5.0, 4.0])
    runs.add("linear_mxfp4", [6.5, 5.6])
    runs.add("linear_mxfp8", [6.5, 5.6], seed=7)
    notes = {row["label"]: row["notes"] for row in content(watched())["runs"]}
    assert notes["linear_mxfp4 seed 1234"] == []
    (note,) = notes["linear_mxfp8 seed 7"]
    assert note.startswith("not a matched pair: data order (training.seed 7 against 1234)")


def test_without_a_baseline_there_is_no_gap_and_a_reason(runs: Runs, watched: Watched) -> None:
    runs.add("linear_mxfp4")
    row = row_of(watched(), "linear_mxfp4")
    assert (row["gap"], row["notes"]) == ("", ["no gap: there is no bf16 run among these"])


def test_another_server_sends_everything(runs: Runs, watched: Watched) -> None:
    runs.add()
    first, second = watched(), watched()
    assert first.server != second.server
    first.refresh()
    second.refresh()
    version = first.state("", 0)["version"]
    answer = second.state(first.server, version)
    assert answer["content"]["summary"] == "1 run: 1 completed"
    assert len(answer["series"]) == 1


def test_new_runs_appear_and_runs_that_are_gone_leave(runs: Runs, watched: Watched) -> None:
    runs.root.mkdir(parents=True)
    watch = watched()
    assert content(watch)["summary"] == "no runs yet"
    run = runs.add("bf16", state=State.RUNNING)
    assert content(watch)["summary"] == "1 run: 1 running"
    runs.add("linear_mxfp4", state=State.FAILED)
    assert content(watch)["summary"] == "2 runs: 1 running, 1 failed"
    run.root.rename(runs.root.parent / "gone")
    shown = content(watch)
    assert [row["label"] for row in shown["runs"]] == ["linear_mxfp4"]
    assert len(watch.state("", 0)["series"]) == 1


def test_the_captures_and_the_queue_are_in_words(runs: Runs) -> None:
    run = runs.add()
    capture = {
        "tensors": 1234,
        "num_bytes": 5e6,
        "queue_bytes": 2e6,
        "waited_s": 90.0,
        "stopped": "full",
    }

    def of_capture(asked: Sequence[RunDir]) -> list[dict[str, Any]]:
        return [{**row, "capture": capture, "about": "on n1"} for row in ledger(asked)]

    watch = FolderWatch(lambda: scope(None, run.root.parent), of_capture, run.root.parent)
    row = content(watch)["runs"][0]
    assert row["captured"] == (
        "1,234 tensors, 5.0 MB; 2.0 MB in the queue; training waited 2m; stopped: full"
    )
    assert row["about"] == "on n1"


def test_losses_that_are_not_finite_are_named(runs: Runs, watched: Watched) -> None:
    runs.add("bf16", [6.0, None, None])
    row = row_of(watched(), "bf16")
    assert row["loss"] == "not finite"
    assert row["notes"] == ["2 iterations without a finite loss are left out of its line"]


def test_a_damaged_file_is_named_and_the_others_are_shown(runs: Runs, watched: Watched) -> None:
    runs.add()
    damaged = runs.add("linear_mxfp4")
    damaged.precision.write_text("{")
    rows = content(watched())["runs"]
    assert rows[0]["notes"] == []
    assert rows[1]["proof"] == ""
    assert rows[1]["notes"][0].startswith(f"{damaged.precision}, line 1: ")


def test_sweeps_have_the_states_of_their_runs(runs: Runs, watched: Watched) -> None:
    names = [runs.add(), runs.add("linear_mxfp4", state=State.RUNNING)]
    sweeps = RunsRoot(runs.root).sweeps
    sweeps.mkdir()
    listed = [{"run": run.root.name} for run in names] + [{"run": None, "reason": "no room"}]
    write_json(sweeps / "20260101.json", {"started": "2026-01-01T00:00:00+00:00", "runs": listed})
    (sweeps / "20260102.json").write_text("{")
    assert content(watched())["sweeps"] == [
        {
            "name": "20260101",
            "started": "2026-01-01T00:00:00+00:00",
            "finished": False,
            "runs": 3,
            "states": "1 running, 1 completed, 1 missing",
        }
    ]


def test_a_folder_that_cannot_be_read_is_named_and_comes_back(runs: Runs) -> None:
    runs.add()
    is_there = True

    def find() -> Scope:
        if is_there:
            return scope(None, runs.root)
        raise RunError("it is gone")

    watch = FolderWatch(find, ledger, runs.root)
    assert content(watch)["notes"] == []
    is_there = False
    shown = content(watch)
    assert shown["notes"] == ["the folder cannot be read: it is gone"]
    assert len(shown["runs"]) == 1
    is_there = True
    assert content(watch)["notes"] == []


def test_runs_without_a_folder_are_missing(runs: Runs) -> None:
    run = runs.add()
    lost = Missing("bf16-2", "its folder is gone")
    watch = FolderWatch(lambda: Scope("a sweep", (run,), (lost,)), ledger, runs.root)
    shown = content(watch)
    assert shown["summary"] == "2 runs: 1 completed, 1 missing"
    assert shown["missing"] == [{"name": "bf16-2", "reason": "its folder is gone"}]


def test_of_too_many_runs_the_newest_are_shown(
    runs: Runs, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_RUNS", 2)
    folders = [runs.add(seed=seed) for seed in range(3)]
    status = read_status(folders[0].status)
    assert status is not None
    write_status(folders[0].status, replace(status))
    shown = content(watched())
    assert [row["name"] for row in shown["runs"]] == [folders[0].root.name, folders[2].root.name]
    assert shown["notes"] == ["the 2 runs that changed last are shown, and 1 are not"]


def test_a_large_file_does_not_keep_the_page_waiting(
    runs: Runs, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "REFRESH_S", 0.0)
    monkeypatch.setattr("quantexp.extras.forensics.watch.metrics.SKETCHED_BYTES", 100_000)
    run = runs.add("bf16", [])
    advance(run, range(1, 30_000))
    watch = watched()
    assert watch.refresh() is False
    answer = watch.state("", 0)
    (line,) = answer["series"].values()
    assert len(line["loss"]["points"][0]) > 300, "the sketch"
    assert answer["content"]["reading"].endswith("%")
    while not watch.refresh():
        pass
    answer = watch.state("", 0)
    (line,) = answer["series"].values()
    assert line["loss"]["window"] == 600
    assert answer["content"]["reading"] == ""


def test_text_of_a_run_cannot_steer_a_terminal_or_a_page(runs: Runs, watched: Watched) -> None:
    runs.add("bf16\x1b[31m\u202e")
    label = content(watched())["runs"][0]["label"]
    assert "\x1b" not in label
    assert "\u202e" not in label


def test_captures_are_found_by_the_runs_key(runs: Runs, watched: Watched) -> None:
    run = runs.add("linear_mxfp8")
    captured(run, iterations=(1, 4))
    watch = watched()
    with pytest.raises(KeyError):
        watch.captured(run.root.name)
    key = content(watch)["runs"][0]["key"]
    assert watch.captured(key)["iterations"] == [1, 4]
    assert watch.numerics(key, 4)["numerics"]["iterations"] == [4]
    for wrong in (run.root.name, str(run.root), "..", ""):
        with pytest.raises(KeyError):
            watch.captured(wrong)


def test_the_thread_rests_when_nobody_looks_and_goes_on_when_somebody_does(
    runs: Runs, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "REFRESH_S", 0.01)
    monkeypatch.setattr(room, "REST_S", 0.05)
    run = runs.add("bf16", [5.0])
    watch = watched()
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        while not watch._rests:
            thread.join(0.01)
        advance(run, range(2, 4))
        thread.join(0.1)
        watch.state("", 0)
        while watch.state("", 0)["content"]["runs"][0]["iteration"] != "3 / 4":
            thread.join(0.01)
    finally:
        watch.close()
        thread.join(120)
    assert not thread.is_alive()


def add(run: RunDir, iteration: int, time: str, trigger: Trigger, words: str = "") -> None:
    folder_of(run, iteration).mkdir(parents=True)
    write_dossier(run, Dossier(iteration, time, trigger, words))


def test_the_newest_dossier_is_first(runs: Runs) -> None:
    first, second = runs.add(), runs.add("linear_mxfp4")
    add(first, 12, "2026-01-30T12:00:00+00:00", Trigger.LOSS, "The loss rose by 3.")
    add(second, 7, "2026-01-31T12:00:00+00:00", Trigger.NONFINITE, "NaN in fc1.")
    add(first, 3, "2025-01-31T12:00:00+00:00", Trigger.REQUEST)
    rows = Dossiers().of([first, second])
    assert [row["iteration"] for row in rows] == ["7", "12", "3"]
    assert rows[0] == {
        "run": second.root.name,
        "folder": "iteration_00000007",
        "iteration": "7",
        "seconds": 1769860800.0,
        "trigger": "nonfinite",
        "words": "NaN in fc1.",
    }


def test_a_dossier_that_is_being_written_appears_when_it_is_whole(runs: Runs) -> None:
    run = runs.add()
    file = folder_of(run, 12) / DOSSIER
    file.parent.mkdir(parents=True)
    dossiers = Dossiers()
    assert dossiers.of([run]) == []
    for text in ("", '{"iteration": 1', '{"iteration": "x"}', "[]", '{"words": "no iteration"}'):
        file.write_text(text)
        assert dossiers.of([run]) == []
    write_dossier(run, Dossier(12, "2026-01-31T12:00:00+00:00", Trigger.LOSS, "9"))
    (row,) = dossiers.of([run])
    assert (row["iteration"], row["trigger"]) == ("12", "loss")


def test_a_page_lists_the_newest_of_many(runs: Runs) -> None:
    run = runs.add()
    for iteration in range(MOST + 5):
        time = f"2026-01-31T12:{iteration // 60:02}:{iteration % 60:02}+00:00"
        add(run, iteration, time, Trigger.LOSS)
    rows = Dossiers().of([run])
    assert len(rows) == MOST
    assert rows[0]["iteration"] == str(MOST + 4)
