"""Executes sweeps and runs on this machine, from configurations to the final table, in foreground or background."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from quantexp.analysis.after_run import draw_skipped, report_sweep
from quantexp.errors import ConfigError, RunError, RunInUseError
from quantexp.launch.outcome import Outcome, in_use_elsewhere
from quantexp.launch.summary import print_how_to_go_on_with_sweep, print_outcome, print_sweep
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp_launchers.local.detach import go_on_in_background
from quantexp_launchers.local.display import Display, ended_line
from quantexp_launchers.local.prepare import prepare_sheet
from quantexp_launchers.local.queue import Queue
from quantexp_launchers.local.sheet import Place, Sheet
from quantexp_launchers.local.slots import Slot, slots_for
from quantexp_launchers.local.stop import count_stop_requests


def run_points(points: Sequence[tuple[Experiment, int]], console: Console) -> int:
    """Run the points of a sweep, each with its stage; returns 0 if all completed or continue in the background, else 1.

    Raises:
        ConfigError: the points differ in an option that a sweep has once; nothing has run.
        RunError: the machine is too small for the parallel runs, or the sweep's list cannot be written.
        KeyboardInterrupt: a stop was requested; no run is running.
    """
    experiments = [experiment for experiment, _ in points]
    slots = slots_for(experiments)
    detach = {experiment.launcher.detach for experiment in experiments}
    if len(detach) > 1:
        raise ConfigError(
            "launcher.detach is one for the whole sweep, got true and false; give it once"
        )
    sheet = prepare_sheet(points, console)
    for item in sheet.items:
        if item.place is Place.DONE:
            console.print(ended_line(item), soft_wrap=True)
    if detach.pop() and any(item.place is not Place.DONE for item in sheet.items):
        go_on_in_background(sheet, console)
        return 0
    return work_through(sheet, slots, console)


def detach_run(experiment: Experiment, console: Console) -> int:
    """Start one run in the background and return; prints the outcome of a completed run instead.

    Raises:
        RunInUseError: the run is in use.
        RunError, DataError: the run cannot start.
    """
    slots_for([experiment])
    sheet = prepare_sheet([(experiment, 0)], console)
    (item,) = sheet.items
    if item.place is Place.WAITING:
        go_on_in_background(sheet, console)
    elif item.place is Place.IN_USE:
        raise RunInUseError(item.reason)
    elif item.outcome is None:
        raise RunError(item.reason)
    elif not item.completed:
        raise in_use_elsewhere(item.outcome.run, item.outcome.reason)
    else:
        _draw_skipped(item.outcome, console)
        print_outcome(item.outcome, console)
    return 0


def work_through(sheet: Sheet, slots: Sequence[Slot], console: Console) -> int:
    """Run the unfinished runs of a sheet in the slots, and print the table of several; returns 0 if all completed.

    Otherwise it returns 1.

    Raises:
        RunError: the sheet cannot be written.
        KeyboardInterrupt: a stop was requested; no run is running.
    """
    with count_stop_requests() as stop, sheet.locked(), Display(sheet.items, console) as display:
        Queue(sheet, slots, stop, display).work()
    outcomes = [item.outcome for item in sheet.items if item.outcome is not None]
    failures = [(i.experiment, i.reason) for i in sheet.items if i.outcome is None]
    trained = not all(item.experiment.evaluate.only for item in sheet.items)
    if len(sheet.items) > 1 or not trained:  # the line of a single training says it all
        print_sweep(outcomes, failures, console)
    if stop.requested:
        again = (State.PENDING, State.CANCELLED, State.PREEMPTED)
        num_left = sum(item.outcome is None or item.state in again for item in sheet.items)
        failed = sum(outcome.state is State.FAILED for outcome in outcomes)
        print_how_to_go_on_with_sweep(
            sheet.files.listing, num_left, failed, len(sheet.items), console
        )
        raise KeyboardInterrupt
    for outcome in outcomes:
        _draw_skipped(outcome, console)
    drawings = [item.experiment.analysis.drawing for item in sheet.items]
    report_sweep(sheet.files.listing, drawings, console, trained=trained)
    return 0 if all(item.completed for item in sheet.items) else 1


def _draw_skipped(outcome: Outcome, console: Console) -> None:
    if outcome.skipped:
        draw_skipped(outcome.run, outcome.experiment.analysis.drawing, console)
