"""Executes one experiment: opens its run folder, runs the worker, and reads the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console

from quantexp.analysis.after_run import draw_skipped
from quantexp.capture.store.manifest import finish_capture
from quantexp.errors import RunError, RunInUseError
from quantexp.launch.attempt import Opened, open_run
from quantexp.launch.outcome import Outcome, in_use_elsewhere, outcome, stopping_words
from quantexp.launch.progress import live_line
from quantexp.launch.summary import print_how_to_go_on, print_outcome
from quantexp.runs.device import device_class
from quantexp.runs.fencing import START, is_newest
from quantexp.runs.outcome import (
    UnresponsiveError,
    record_exit,
    record_interruption,
    record_unresponsive,
)
from quantexp.runs.provenance import command_line
from quantexp.runs.snapshot import environment
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.terminal.console import complain
from quantexp_launchers.local import processes
from quantexp_launchers.local.slots import make_slots
from quantexp_launchers.local.warm import WarmStart


def run_alone(experiment: Experiment, console: Console) -> int:
    """Execute one run and print its outcome: 0 completed, 1 failed, 130 interrupted.

    Raises:
        RunError, DataError: the run cannot start.
    """
    done = execute(experiment, console)
    if done.state is State.COMPLETED:
        if done.skipped:
            draw_skipped(done.run, experiment.analysis.drawing, console)
        print_outcome(done, console)
        return 0
    complain(f"{done.run.root.name} {done.state.value}: {done.reason}")
    if done.state is State.CANCELLED:
        print_how_to_go_on(done.run, console)
        return 130
    return 1


def execute(experiment: Experiment, console: Console) -> Outcome:
    """Run an experiment on this machine, with a live line, unless it is already completed.

    An interrupt (Ctrl-C) ends the worker; the outcome is then cancelled.

    Raises:
        RunError, DataError: the run cannot start.
    """
    make_slots(1, experiment.launcher.num_processes)
    with open_run(experiment, device_class(experiment.launcher), command_line()) as (folder, lock):
        if folder.elsewhere is not None:
            raise in_use_elsewhere(folder.run, folder.elsewhere)
        if folder.notice is not None:
            console.print(folder.notice, soft_wrap=True)
        if folder.ready:
            assert lock is not None
            names = [experiment.model.name, experiment.dataset.name, str(experiment.quant.name)]
            with live_line(folder.run, names, console) as update:
                carry_out(
                    experiment,
                    folder,
                    lock,
                    update,
                    on_stop=lambda grace_s: console.print(stopping_words(grace_s), soft_wrap=True),
                )
        return outcome(experiment, folder.run, folder.skipped)


def carry_out(
    experiment: Experiment,
    folder: Opened,
    lock: int,
    on_poll: Callable[[], None],
    variables: Mapping[str, str] | None = None,
    on_stop: Callable[[float], None] = lambda _: None,
    warm: WarmStart | None = None,
) -> None:
    """Run a prepared attempt to its end and record its outcome in the folder.

    A KeyboardInterrupt, from the user or raised by `on_poll`, cancels the run; a second one kills it.

    Args:
        experiment: the experiment.
        folder: the opened folder, which is ready.
        lock: the descriptor of the folder's lock.
        on_poll: called several times a second.
        variables: environment variables of the workers, added to this process's environment.
        on_stop: called after an interrupt with the grace period of the workers, in seconds.
        warm: starts the worker, if it can.
    """
    launcher = experiment.launcher
    start = {} if folder.claim is None else {START: folder.claim}
    try:
        code = processes.run_workers(
            folder.run,
            launcher,
            on_poll,
            {**environment(folder.snapshot), **start, **(variables or {})},
            keep_open=(lock,),
            on_stop=on_stop,
            warm=warm,
        )
        record: Callable[[], None] = partial(record_exit, folder.run, launcher.num_processes, code)
    except KeyboardInterrupt:
        record = partial(record_interruption, folder.run, launcher.num_processes)
    except UnresponsiveError as error:
        record = partial(record_unresponsive, folder.run, launcher.num_processes, error)
    if folder.claim is not None and not is_newest(folder.run, folder.claim):
        if not folder.run.start.exists():
            raise RunError(
                f"{folder.run.root} was deleted or moved while its run executed; start the run again"
            )
        raise RunInUseError(
            f"{folder.run.root} was taken over by another process, because the claim of this one was deleted"
        )
    finish_capture(folder.run.captured(experiment.capture.dir))
    record()
