"""Executes sweeps and runs on this machine, from configurations to the final table, in foreground or background.

The background process is `python -m quantexp_launchers.local.submit LIST`, in a session of its own, from the source
snapshot. The command prepares the folders and writes the sweep's list, which is all that the process receives. It
prints the same as a foreground sweep without a terminal. SIGTERM cancels its running runs and leaves the pending ones
pending; if it is killed, its running runs end too. It ignores SIGHUP, which a closed terminal or a logout sends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp.analysis.after_run import draw_skipped, report_sweep
from quantexp.errors import ConfigError, QuantexpError, RunError, RunInUseError
from quantexp.folders import for_shell, short_path
from quantexp.launch.outcome import Outcome, in_use_elsewhere
from quantexp.launch.summary import print_how_to_go_on_with_sweep, print_outcome, print_sweep
from quantexp.runs.lock import is_held
from quantexp.runs.ranks import log_end
from quantexp.runs.snapshot import environment, take_snapshot
from quantexp.runs.status import State
from quantexp.runs.sweep_list import read_sweep
from quantexp.schema import Experiment
from quantexp.terminal.console import complain, pipe_console
from quantexp_launchers.local.display import Display, ended_line
from quantexp_launchers.local.queue import Queue
from quantexp_launchers.local.slots import Slot, slots_for
from quantexp_launchers.local.stop import count_stop_requests
from quantexp_launchers.local.sweep import Place, Sweep, prepare, read_list

#: Seconds between two looks at the lock of a sweep that starts in the background.
LOOK_S = 0.05


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
    sweep = prepare(points, console)
    for item in sweep.items:
        if item.place is Place.DONE:
            console.print(ended_line(item), soft_wrap=True)
    if detach.pop() and any(item.place is not Place.DONE for item in sweep.items):
        go_on_in_background(sweep, console)
        return 0
    return work_through(sweep, slots, console)


def detach_run(experiment: Experiment, console: Console) -> int:
    """Start one run in the background and return; prints the outcome of a completed run instead.

    Raises:
        RunInUseError: the run is in use.
        RunError, DataError: the run cannot start.
    """
    slots_for([experiment])
    sweep = prepare([(experiment, 0)], console)
    (item,) = sweep.items
    if item.place is Place.WAITING:
        go_on_in_background(sweep, console)
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


def work_through(sweep: Sweep, slots: Sequence[Slot], console: Console) -> int:
    """Run the unfinished runs of a sweep in the slots, and print the table of several; returns 0 if all completed.

    Otherwise it returns 1.

    Raises:
        RunError: the list cannot be written.
        KeyboardInterrupt: a stop was requested; no run is running.
    """
    display = Display(sweep.items, console)
    with count_stop_requests() as stop, sweep.locked(), display.shown():
        Queue(sweep, slots, stop, display).work()
    outcomes = [item.outcome for item in sweep.items if item.outcome is not None]
    failures = [(i.experiment, i.reason) for i in sweep.items if i.outcome is None]
    trained = not all(item.experiment.evaluate.only for item in sweep.items)
    if len(sweep.items) > 1 or not trained:  # the line of a single training says it all
        print_sweep(outcomes, failures, console)
    if stop.requested:
        again = (State.PENDING, State.CANCELLED, State.PREEMPTED)
        num_left = sum(item.outcome is None or item.state in again for item in sweep.items)
        failed = sum(outcome.state is State.FAILED for outcome in outcomes)
        print_how_to_go_on_with_sweep(
            sweep.files.listing, num_left, failed, len(sweep.items), console
        )
        raise KeyboardInterrupt
    for outcome in outcomes:
        _draw_skipped(outcome, console)
    drawings = [item.experiment.analysis.drawing for item in sweep.items]
    report_sweep(sweep.files.listing, drawings, console, trained=trained)
    return 0 if all(item.completed for item in sweep.items) else 1


def _draw_skipped(outcome: Outcome, console: Console) -> None:
    if outcome.skipped:
        draw_skipped(outcome.run, outcome.experiment.analysis.drawing, console)


def go_on_in_background(sweep: Sweep, console: Console) -> None:
    """Start the background process, and print how to follow and stop it.

    Raises:
        RunError: the process did not start; with the end of its log.
    """
    sweep.write()
    pid = _start(sweep)
    unfinished = [item for item in sweep.items if item.place is not Place.DONE]
    num_done = len(sweep.items) - len(unfinished)
    words = "1 run continues" if len(unfinished) == 1 else f"{len(unfinished)} runs continue"
    rest = f" ({num_done} of {len(sweep.items)} are already done)" if num_done else ""
    console.print(f"{words} in the background, process {pid}{rest}", soft_wrap=True)
    run = unfinished[0].run
    assert run is not None
    alone = len(sweep.items) == 1
    scope = for_shell(run.root if alone else sweep.files.listing)
    for label, text in (
        ("runs", short_path(run.root if alone else sweep.root)),
        ("follow", f"quantexp status {scope}"),
        ("", f"quantexp logs {for_shell(run.root)} -f"),
        ("stop", f"quantexp cancel {scope}"),
        ("log", short_path(sweep.files.log)),
    ):
        console.print(f"[bold]{label:8}[/]{escape(str(text))}", soft_wrap=True)


def _start(sweep: Sweep) -> int:
    """Start the background process and return its id once it holds the sweep.

    Raises:
        RunError: the process did not start.
    """
    with sweep.files.log.open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quantexp_launchers.local.submit"),
                str(sweep.files.listing),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment(take_snapshot(sweep.root))},
        )
    try:
        while process.poll() is None and not is_held(sweep.files.lock):
            time.sleep(LOOK_S)
    except BaseException:  # the user interrupted the command
        process.terminate()
        process.wait()
        raise
    if process.returncode is None or _is_finished(sweep):
        process.returncode = 0  # it outlives this process, which must not wait for it
        return process.pid
    for item in sweep.items:
        if item.place is Place.WAITING:
            item.hold_back("the background process did not start")
    raise RunError(f"the background process did not start; {log_end(sweep.files.log)}")


def _is_finished(sweep: Sweep) -> bool:
    """Whether a process has held the sweep to its end."""
    with contextlib.suppress(RunError):
        return read_sweep(sweep.files.listing).get("finished") is not None
    return False


def main(file: Path) -> int:
    """Execute the sweep of a list in this process; exit codes are those of `quantexp`."""
    try:
        sweep = read_list(file)
        slots = slots_for([item.experiment for item in sweep.items])
        return work_through(sweep, slots, pipe_console())
    except QuantexpError as error:
        complain(error.message, error.listed)
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its workers inherit this
    sys.exit(main(Path(sys.argv[1])))
