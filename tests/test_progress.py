"""The live line and what it reads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.paths import RunDir
from quantexp.progress import human_bytes, last_metrics, live_line
from quantexp.status import State, Status, write_status

LINE = '{"iteration": 2, "loss": 5.5, "tokens_per_s": 1234.5}\n'


def test_last_whole_line_is_taken(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("phase", "capture", "shown"),
    [
        ("building the model", {}, "building the model"),
        ("capturing", {"current": "layer 0 fc1 input"}, "capturing layer 0 fc1 input"),
        ("training", {"tensors": 64, "num_bytes": 2_400_000}, "64 tensors, 2.4 MB"),
        ("training", {}, "training"),
    ],
)
def test_line_says_what_the_run_is_doing(
    tmp_path: Path, phase: str, capture: dict[str, object], shown: str
) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system=None)
    with live_line(run, ["model", "data", "scheme"], console) as update:
        update()
        status = Status(State.RUNNING, phase=phase, iteration=2, iterations=8, capture=capture)
        write_status(run.status, status)
        run.metrics.write_text(LINE)
        update()
    text = out.getvalue()
    assert "model data scheme" in text
    assert "2/8" in text
    assert "loss 5.5000  1,234 tokens/s" in text
    assert shown in text


def test_a_narrow_terminal_shows_the_scheme_and_the_time(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    names = ["llama32-1b", "wikipedia", "FA_linear_mxfp8"]
    capture = {"current": "layer 0 fc1 backward grad_output"}
    status = Status(State.RUNNING, phase="capturing", iteration=2, iterations=8, capture=capture)
    write_status(run.status, status)
    run.metrics.write_text(LINE)
    with live_line(run, names, console) as update:
        update()
    text = out.getvalue()
    assert "FA_linear_mxfp8" in text
    assert "llama32-1b" not in text
    assert "0:00:00" in text


def test_broken_status_does_not_end_the_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with live_line(run, ["model", "data", "name"], Console(quiet=True)) as update:
        run.status.write_text("{")
        update()
