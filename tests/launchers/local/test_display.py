"""A sweep's display: plain lines without a terminal; on a terminal, one fitting line for each run."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from quantexp_launchers.local.display import Display, ended_line, summary
from quantexp_launchers.local.sweep import Item, Place, prepare
from rich.console import Console

from quantexp.launch.outcome import Outcome
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, Status, write_status
from quantexp.schema import Experiment

from .stand_in import Workers, output_of

METRICS = '{"iteration": 2, "loss": 5.5, "tokens_per_s": 1234.5}\n'


@pytest.fixture
def items(make: Callable[..., Experiment], workers: Workers) -> list[Item]:
    schemes = ["FA_linear_mxfp8", "FA_linear_hifp8"]
    points = [(make(seed, scheme=scheme), 0) for seed in (1, 2) for scheme in schemes]
    return prepare(points, Console(quiet=True)).items


def run_of(item: Item) -> RunDir:
    assert item.run is not None
    return item.run


def over(item: Item, state: State, reason: str = "", **values: object) -> None:
    item.place = Place.DONE
    item.outcome = Outcome(item.experiment, run_of(item), state, reason, **values)  # type: ignore[arg-type]


def test_without_a_terminal_the_display_is_plain_lines(items: list[Item], console: Console) -> None:
    with Display(items, console).shown() as display:
        display.started(items[0])
        display.update(0)
        over(items[0], State.COMPLETED, metrics={"loss": 5.5}, tensors=3, num_bytes=1000)
        display.ended(items[0])
        display.started(items[1])
        items[1].place = Place.IN_USE
        display.ended(items[1])
    assert output_of(console).splitlines() == [
        "started    FA_linear_mxfp8 seed=1",
        "completed  FA_linear_mxfp8 seed=1: loss 5.5000, 3 tensors, 1.0 kB",
        "started    FA_linear_hifp8 seed=1",
        "postponed  FA_linear_hifp8 seed=1: another process holds its lock",
    ]


def test_summary_counts_the_runs_in_each_state(items: list[Item]) -> None:
    assert summary(items) == "0 of 4 completed, 4 waiting"
    over(items[0], State.COMPLETED)
    over(items[1], State.FAILED)
    items[2].place, items[3].place = Place.RUNNING, Place.IN_USE
    assert summary(items) == "1 of 4 completed, 1 failed, 1 running, 1 run by other processes"


def test_ended_line_has_the_reason(items: list[Item]) -> None:
    over(items[0], State.FAILED, "loss [nan]")
    assert ended_line(items[0]) == r"[red]failed    [/] FA_linear_mxfp8 seed=1: loss \[nan]"
    items[1].place, items[1].reason = Place.DONE, "no data"
    assert ended_line(items[1]) == "[red]failed[/]     FA_linear_hifp8 seed=1: no data"
    over(items[2], State.COMPLETED, "already completed", skipped=True)
    assert ended_line(items[2]) == "[green]skipped   [/] FA_linear_mxfp8 seed=2: 0 tensors, 0 B"


@pytest.mark.parametrize("width", [80, 160])
def test_every_line_fits_the_terminal_and_has_the_whole_name(items: list[Item], width: int) -> None:
    statuses = [
        Status(State.RUNNING, phase=Phase.TRAINING, iteration=2, iterations=1000),
        Status(State.RUNNING, phase=Phase.CAPTURING, iterations=8, current_iteration=1),
        Status(State.RUNNING, phase=Phase.IMPORTING, iterations=8),
        Status(State.COMPLETED, iteration=8, iterations=8),
    ]
    out = io.StringIO()
    console = Console(file=out, width=width, height=40, force_terminal=True, color_system=None)
    with Display(items, console).shown() as display:
        for item, status in zip(items, statuses, strict=True):
            item.place = Place.RUNNING
            write_status(run_of(item).status, status)
            display.started(item)
        run_of(items[0]).metrics.write_text(METRICS)
        display.update(0)
        with console.capture() as captured:
            console.print(display.live.get_renderable())
    lines = captured.get().splitlines()
    assert lines[0].startswith("0 of 4 completed, 4 running  0:00:0")
    assert all(len(line) <= width for line in lines)
    assert [line.split()[:2] for line in lines[1:4]] == [
        [f"FA_linear_{name}", f"seed={seed}"]
        for name, seed in (("mxfp8", 1), ("hifp8", 1), ("mxfp8", 2))
    ]
    assert "2/1000  loss 5.5000  training" in lines[1]
    assert "capturing iteration 1" in lines[2]
    assert "importing" in lines[3]
    assert width == 80 or all(":00:0" in line for line in lines[1:])


def test_requested_stop_is_shown(items: list[Item], console: Console) -> None:
    with Display(items, console).shown() as display:
        display.update(1)
        assert display.summary.plain.startswith(
            "stopping (Ctrl-C again stops at once): 0 of 4 completed"
        )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_closed_output_ends_no_run(items: list[Item], is_terminal: bool) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    console = Console(quiet=False, width=80, force_terminal=is_terminal)
    with Display(items, console).shown() as display:
        console.file = Gone()
        display.started(items[0])
        over(items[0], State.COMPLETED)
        display.ended(items[0])
        display.update(0)
    console.print("the table")
    assert console.quiet
