"""A run's standing as rows for programs."""

from __future__ import annotations

import json
from pathlib import Path

from quantexp.launch.backend import Job, Standing
from quantexp.launch.ledger.rows import status_rows
from quantexp.launch.pace import Pace
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status

KEYS = [
    *("run", "path", "state", "alive", "reason", "where", "note", "phase"),
    *("phase_since", "current_iteration", "micro_batch"),
    *("iteration", "iterations", "loss", "tokens_per_s", "capture", "skipped"),
    *("nonfinite", "dossiers", "time_left_s"),
    *("host", "pid", "job_id", "submission", "goes_on_at", "restarts"),
    *("created", "started", "updated", "finished"),
]
RUN = RunDir(Path("/r/m_d_bf16-1"))
PACE = Pace(3.25, 15420.4, 3900.0)


def test_every_run_has_the_same_keys() -> None:
    entries = [Standing(RUN, State.RUNNING, pace=PACE), Standing(RUN, None, reason="no status")]
    rows = json.loads(json.dumps(status_rows(entries, [Missing("m_d_x-2", "gone")])))
    assert [list(row) for row in rows] == [KEYS] * 3
    assert [row["state"] for row in rows] == ["running", "unreadable", "missing"]
    assert [row["reason"] for row in rows] == ["", "no status", "gone"]
    assert rows[2]["run"] == "m_d_x-2"
    assert rows[2]["iteration"] is None


def test_numbers_are_the_last_iterations() -> None:
    status = Status(State.RUNNING, iteration=3, iterations=8)
    (row,) = status_rows([Standing(RUN, State.RUNNING, status=status, pace=PACE)])
    assert (row["iteration"], row["iterations"]) == (3, 8)
    assert (row["loss"], row["tokens_per_s"], row["time_left_s"]) == (3.25, 15420.4, 3900.0)


def test_capture_has_its_tensors_queue_and_writing_speed() -> None:
    counts = {"tensors": 64, "num_bytes": 2400, "current": "L0 output", "stopped": ""}
    queue = {"queue_bytes": 1200, "bytes_per_s": 2.5, "waited_s": 0.5}
    status = Status(State.RUNNING, capture={**counts, **queue})
    (row,) = status_rows([Standing(RUN, State.RUNNING, status=status)])
    assert row["capture"] == {"tensors": 64, "num_bytes": 2400, **queue, "stopped": ""}
    (row,) = status_rows([Standing(RUN, State.RUNNING)])
    assert row["capture"] is None


def test_note_is_about_the_launcher_or_lost_metrics() -> None:
    cut = Pace(early_end="metrics.jsonl ends at iteration 2 of 3")
    entries = [
        Standing(RUN, State.FAILED, pace=pace, note=note)
        for pace, note in ((cut, None), (PACE, "n"))
    ]
    assert [row["note"] for row in status_rows(entries)] == [cut.early_end, "n"]
    assert status_rows([Standing(RUN, State.FAILED, pace=PACE)])[0]["note"] is None


def test_run_that_has_ended_has_no_time_left() -> None:
    (row,) = status_rows([Standing(RUN, State.FAILED, pace=PACE)])
    assert row["time_left_s"] is None


def test_job_and_its_restarts_are_the_schedulers_if_it_knows_more() -> None:
    job = Job("7_4", "running", restarts=2)
    status = Status(restarts=[{"reason": "preempted"}])
    (row,) = status_rows([Standing(RUN, State.RUNNING, status=status, job=job)])
    assert (row["job_id"], row["restarts"]) == ("7_4", 2)
    (row,) = status_rows([Standing(RUN, State.RUNNING, status=status)])
    assert (row["job_id"], row["restarts"]) == (None, 1)
