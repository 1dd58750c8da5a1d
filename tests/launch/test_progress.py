"""The live line and its sources."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quantexp.launch.progress import PlainLines, RunLine, activity, lines_table, live_line
from quantexp.runs.metrics import Speed, last_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, Status, write_status
from quantexp.terminal.units import human_bytes

LINE = '{"iteration": 2, "loss": 5.5, "tokens_per_s": 1234.5}\n'


def test_last_whole_line_is_used(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert last_metrics(run) is None
    run.metrics.write_text("")
    assert last_metrics(run) is None
    run.metrics.write_text(LINE + '{"iteration": 3, "lo')
    metrics = last_metrics(run)
    assert metrics is not None
    assert metrics["iteration"] == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (2_400_000, "2.4 MB"),
        (1.5e9, "1.5 GB"),
        (2e12, "2.0 TB"),
        (3e15, "3000.0 TB"),
    ],
)
def test_bytes_are_in_decimal_units(count: float, text: str) -> None:
    assert human_bytes(count) == text


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def running(phase: Phase, seconds: float = 130, **values: Any) -> Status:
    own: dict[str, Any] = {"iteration": 2, "iterations": 8, "current_iteration": 3, **values}
    return Status(State.RUNNING, phase=phase, phase_since=ago(seconds), **own)


@pytest.mark.parametrize(
    ("phase", "seconds", "values", "words"),
    [
        (Phase.IMPORTING, 130, {}, "importing for 2m"),
        (Phase.BUILDING, 0, {}, "building the model"),
        (Phase.TRAINING, 1, {}, "training"),
        (Phase.TRAINING, 720, {}, "iteration 3 for 12m"),
        (Phase.PROVING, 720, {}, "iteration 3, proving the precision map for 12m"),
        (Phase.CAPTURING, 130, {}, "capturing iteration 3 for 2m"),
        (Phase.STEPPING, 130, {}, "iteration 3, optimizer step for 2m"),
        (
            Phase.CAPTURING,
            130,
            {"micro_batch": 3, "micro_batches": 4},
            "capturing iteration 3, micro-batch 3 of 4 for 2m",
        ),
        (Phase.WRITING, 130, {"capture": {"queue_bytes": 1.2e8}}, "writing 120.0 MB for 2m"),
        (Phase.WRITING, 130, {}, "writing for 2m"),
        (Phase.DRAWING, 130, {}, "drawing for 2m"),
        (Phase.NONE, 130, {}, ""),
    ],
)
def test_activity_is_the_current_phase_and_its_duration(
    phase: Phase, seconds: float, values: dict[str, Any], words: str
) -> None:
    assert activity(running(phase, seconds, **values)) == words


def text_of(line: RunLine, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(lines_table([line], width))
    (text,) = out.getvalue().splitlines()
    return text.rstrip()


@pytest.fixture
def line() -> RunLine:
    capture = {"tensors": 64, "num_bytes": 2_400_000}
    status = running(Phase.CAPTURING, micro_batch=3, micro_batches=4, capture=capture)
    return RunLine(
        "llama32-1b wikipedia FA_linear_mxfp8",
        status=status,
        loss=5.5,
        speed=Speed(step_time_s=130.0, tokens_per_s=1234.5),
    )


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_line_of_any_width_keeps_iteration_loss_and_time_left(line: RunLine, width: int) -> None:
    text = text_of(line, width)
    assert len(text) <= width
    for words in ("2/8", "loss 5.5000", "13m left", "FA_linear_mxfp8"):
        assert words in text
    assert ("1,234 tokens/s" in text) == (width == 160)


def test_a_wide_line_has_everything(line: RunLine) -> None:
    assert text_of(line, 160).split("  ") == [
        "llama32-1b wikipedia FA_linear_mxfp8",
        "2/8",
        "loss 5.5000",
        "13m left",
        "capturing iteration 3, micro-batch 3 of 4 for 2m",
        "1,234 tokens/s",
        "64 tensors, 2.4 MB",
        "0:00:00",
    ]


def test_a_narrow_line_omits_what_is_least_important(line: RunLine) -> None:
    line.name = "FA_linear_mxfp8"
    assert text_of(line, 80).startswith(
        "FA_linear_mxfp8  2/8  loss 5.5000  13m left  capturing iteration 3, micr"
    )


def test_the_live_line_follows_the_folder(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with live_line(run, ["model", "data", "scheme"], console) as update:
        update()
        write_status(run.status, running(Phase.BUILDING))
        run.metrics.write_text(LINE)
        update()
    text = out.getvalue()
    assert "scheme  2/8  loss 5.5000  building the model for 2m" in text
    assert "model data scheme" not in text


def test_without_a_terminal_there_are_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 0.0, 1.0, 3.0, 70.0, 140.0])
    run, out = RunDir(tmp_path), io.StringIO()
    with live_line(run, ["m", "d", "s"], Console(file=out, width=40)) as update:
        monkeypatch.setattr("quantexp.launch.progress.time.monotonic", lambda: next(seconds))
        update()
        write_status(run.status, running(Phase.BUILDING))
        update()
        write_status(run.status, running(Phase.TRAINING, 0))
        run.metrics.write_text(LINE)
        update()  # too soon
        for _ in range(3):
            update()
    assert out.getvalue() == (
        "building the model for 2m\n" + "iteration 2 of 8, loss 5.5000, 1,234 tokens/s\n" * 3
    )


def test_every_run_has_a_line_however_soon_it_follows_another() -> None:
    lines: list[str] = []
    plain = PlainLines(lines.append)
    for i in range(20):  # each at the memory address of the one before
        plain.update(RunLine("s", status=running(Phase.BUILDING)), f"{i} ")
    assert lines == [f"{i} building the model for 2m" for i in range(20)]


def test_broken_status_does_not_end_the_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with live_line(run, ["model", "data", "name"], Console(quiet=True)) as update:
        run.status.write_text("{")
        update()
