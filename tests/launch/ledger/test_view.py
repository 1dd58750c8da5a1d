"""The table, its summary and the JSON."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quantexp.launch.backend import Job, Standing
from quantexp.launch.ledger.view import duration, status_rows, summary, view  # type: ignore[attr-defined]
from quantexp.launch.outcome import Pace
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, Status

GONE = Missing("m-1b_d_old-00000009", "its folder is gone: /r/m-1b_d_old-00000009")
LIMIT = "the time limit of 240 min was reached at iteration 3 of 8; give more"


def standing_of(scheme: str, state: State | None, **fields: Any) -> Standing:
    run = RunDir(Path(f"/r/m-1b_d_{scheme}-0a1b2c3d"))
    status = Status(state or State.PENDING, iteration=3, iterations=8)
    return replace(Standing(run, state, status=status, pace=Pace(3.25, 15420.4, 3900.0)), **fields)


MIXED = [
    standing_of("bf16", State.COMPLETED),
    standing_of("FA_mxfp8", State.RUNNING, alive=True, where="job 7_4 running on n1"),
    standing_of("FA_mxfp4", State.PREEMPTED, reason=LIMIT),
    standing_of(
        "FA_hifp8", State.FAILED, reason="out [of] memory; the end of rank0.log:\nline\nline"
    ),
    standing_of("FA_own", State.PREEMPTED, reason=LIMIT),
    standing_of("linear_mxfp8", None, reason="status.json cannot be read"),
]


def lines_of(
    entries: list[Standing], width: int, *missing: Missing, height: int | None = None
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view(entries, missing, console, height), crop=False)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_wide_table_has_a_line_for_each_run_with_its_place_or_reason() -> None:
    lines = lines_of(MIXED, 160, GONE)
    headings = ["run", "state", "iteration", "loss", "tokens/s", "left", "where, or why it ended"]
    assert re.split("  +", lines[0]) == headings
    assert lines[2].split("  ", 1)[0] == "m-1b_d_FA_mxfp8-0a1b2c3d"
    assert lines[2].split()[1:6] == ["running", "3/8", "3.2500", "15,420", "1h"]
    assert lines[2].endswith("05m  job 7_4 running on n1")
    assert lines[3].endswith(LIMIT)
    assert lines[4].endswith("out [of] memory; the end of rank0.log:")
    assert "unreadable" in lines[6]
    assert lines[7].split()[:2] == ["m-1b_d_old-00000009", "missing"]
    assert lines[-1] == (
        "7 runs: 1 running, 1 completed, 1 failed, 2 preempted, 1 unreadable, 1 missing"
    )


def test_narrow_table_omits_the_common_prefix_and_lists_reasons_below_once() -> None:
    lines = lines_of(MIXED, 80, GONE)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "m-1b_d_..."
    assert lines[1].split() == ["run", "state", "iteration", "loss", "tokens/s", "left"]
    assert [line.split()[0] for line in lines[2:8]] == [
        f"{name}-0a1b2c3d"
        for name in ("bf16", "FA_mxfp8", "FA_mxfp4", "FA_hifp8", "FA_own", "linear_mxfp8")
    ]
    below = [re.split("  +", line) for line in lines[lines.index("", 8) + 1 :]]
    assert below[0] == ["FA_mxfp8-0a1b2c3d", "job 7_4 running on n1"]
    assert below[1][0] == "FA_mxfp4-0a1b2c3d"
    assert below[1][1] == "the time limit of 240 min was reached at iteration 3 of"
    assert below[2] == ["FA_own-0a1b2c3d", "8; give more"]
    assert below[5] == ["m-1b_d_old-00000009", GONE.reason]
    assert sum("the time limit" in line for line in lines) == 1


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_command_in_a_reason_stays_on_a_line(width: int) -> None:
    command = "quantexp draw '/runs of mine/m-1b_d_linear_hifp8-0a1b2c3d'"
    failed = standing_of("linear_hifp8", State.FAILED, reason=f"no figures (disk full); {command}")
    assert any(command in line for line in lines_of([*MIXED, failed], width))


@pytest.mark.parametrize(
    "pace", [Pace(early_end="what is wrong"), Pace(without_a_step="what is wrong")]
)
def test_lost_metrics_and_missing_steps_are_in_the_row(pace: Pace) -> None:
    lines = lines_of([replace(standing_of("bf16", State.COMPLETED), pace=pace), MIXED[0]], 160)
    assert any(line.rstrip().endswith("what is wrong") for line in lines)


def test_names_never_lose_a_part_of_their_scheme() -> None:
    entries = [standing_of("FA_mxfp8", State.COMPLETED), standing_of("FA_mxfp4", State.COMPLETED)]
    assert lines_of(entries, 60)[2].startswith("FA_mxfp8-0a1b2c3d")


def test_one_run_keeps_its_whole_name() -> None:
    assert lines_of([MIXED[0]], 80)[1].startswith("m-1b_d_bf16-0a1b2c3d")


def test_many_runs_of_one_reason_are_named_in_part() -> None:
    entries = [standing_of(f"s{i}", State.FAILED, reason="no data") for i in range(9)]
    lines = lines_of(entries, 80)
    assert "and 6 more" in lines
    assert sum("no data" in line for line in lines) == 1


def test_table_that_is_too_high_omits_completed_runs() -> None:
    entries = [*(standing_of(f"s{i}", State.COMPLETED) for i in range(30)), MIXED[1]]
    lines = lines_of(entries, 160, height=10)
    assert len(lines) == 3
    assert lines[-1] == "31 runs: 1 running, 30 completed"
    assert len(lines_of(entries, 160)) == 33


def waiting(name: str) -> Standing:
    job = Job(f"7_{name}", "waiting (Priority)", is_waiting=True)
    where = f"job {job.id} waiting (Priority)"
    return standing_of(name, State.PENDING, alive=True, where=where, job=job)


def test_jobs_that_wait_for_the_same_reason_share_a_line_in_a_narrow_table() -> None:
    lines = lines_of([waiting(f"s{i}") for i in range(9)], 80)
    assert sum("waiting (Priority)" in line for line in lines) == 1
    assert "job 7_s3 waiting (Priority)" in lines_of([waiting(f"s{i}") for i in range(9)], 160)[4]


@pytest.mark.parametrize("width", [80, 160])
def test_running_capture_is_shown_beside_the_job(width: int) -> None:
    capture = {"tensors": 64, "num_bytes": 2.4e6, "queue_bytes": 1.2e6, "bytes_per_s": 5e6}
    status = Status(State.RUNNING, iteration=3, iterations=8, capture=capture)
    running = replace(MIXED[1], status=status)
    words = "job 7_4 running on n1; 64 tensors, 2.4 MB, 1.2 MB wait, 5.0 MB/s"
    assert words in " ".join(" ".join(lines_of([running, MIXED[0]], width)).split())
    stopped = replace(status, capture={"stopped": "capture stopped in iteration 2: full"})
    lines = lines_of([replace(running, status=stopped)], width)
    assert any(line.endswith("job 7_4 running on n1; capture stopped") for line in lines)
    ended = replace(MIXED[2], status=status)
    assert "tensors" not in " ".join(lines_of([ended], width)), "the report counts them"


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("height", [8, 24, 40])
def test_live_table_fits_the_terminal_and_shows_running_runs(width: int, height: int) -> None:
    entries = [waiting(f"s{i}") for i in range(60)]
    entries += [
        standing_of("late", State.COMPLETED),
        standing_of("z", State.RUNNING, where="job 7_z on n1"),
    ]
    lines = lines_of(entries, width, GONE, height=height)
    assert len(lines) <= height
    assert any("z-0a1b2c3d" in line and "running" in line for line in lines)
    assert lines[-1] == "63 runs: 60 pending, 1 running, 1 completed, 1 missing"
    assert re.fullmatch(r"and \d+ more", lines[-2])


def test_note_about_a_failed_query_is_printed_once() -> None:
    entries = [
        standing_of(f"s{i}", State.RUNNING, note="its job was not queried: why") for i in range(3)
    ]
    assert lines_of([*entries, MIXED[0]], 160)[-2] == "3 of 4: its job was not queried: why"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (0, "0s"),
        (59.2, "59s"),
        (60, "1m"),
        (3540, "59m"),
        (3599, "1h 00m"),
        (3900, "1h 05m"),
        (86400 * 2 + 3600 * 4, "2d 04h"),
    ],
)
def test_time_left_is_short(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_summary_counts_in_the_order_of_a_run_s_life() -> None:
    assert summary([MIXED[0]]) == "1 run: 1 completed"
    assert summary([]) == "no runs"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_line_is_longer_than_the_width_and_no_word_is_broken(width: int) -> None:
    lines = lines_of(MIXED, width, GONE)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    for word in ("preempted", "unreadable", "3.2500", "1h 05m", "m-1b_d_old-00000009", "memory;"):
        assert word in text


def test_running_run_shows_its_current_phase() -> None:
    status = Status(
        State.RUNNING, phase=Phase.CAPTURING, current_iteration=1, iterations=8, micro_batch=1
    )
    lines = lines_of([replace(MIXED[1], status=status)], 160)
    assert lines[1].endswith("job 7_4 running on n1; capturing iteration 1")


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
