"""One experiment, from its configuration to its outcome: open the folder, run the worker, read what it left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console

from quantexp.capture.ending import finish_capture
from quantexp.device import device_class
from quantexp.ending import ended, interrupted
from quantexp.errors import RunError, RunInUseError
from quantexp.paths import RunDir
from quantexp.progress import live_line, recent_metrics
from quantexp.provenance import command_line
from quantexp.queueing.slots import make_slots
from quantexp.record import Opened, opened
from quantexp.schema import Experiment, LauncherConfig
from quantexp.source import environment
from quantexp.speed import Speed, speed_of
from quantexp.status import State, read_json, read_status


@dataclass(frozen=True)
class Outcome:
    """How a run ended, from its folder."""

    experiment: Experiment
    run: RunDir
    state: State
    #: Why it failed, or was skipped.
    reason: str = ""
    skipped: bool = False
    #: The last line of metrics.jsonl.
    metrics: dict[str, Any] | None = None
    speed: Speed = field(default_factory=Speed)
    #: Tensors captured, and their bytes.
    tensors: int = 0
    num_bytes: int = 0
    #: precision.json, where the proof got that far.
    precision: dict[str, Any] | None = None
    #: What status.json says of each tracker.
    tracking: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: What the certificates of `quantexp verify` say of the numerics that ran.
    verified: str | None = None


def execute(experiment: Experiment, console: Console) -> Outcome:
    """Run an experiment on this machine, with a live line, unless it is completed already.

    An interrupt (Ctrl-C) ends the worker and gives an outcome whose state is cancelled.

    Raises:
        RunError, DataError: it cannot start.
    """
    make_slots(1, experiment.launcher.num_processes)
    with opened(experiment, device_class(experiment.launcher), command_line()) as (folder, lock):
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


def stopping_words(grace_s: float) -> str:
    """What to say when an end was asked for."""
    return f"stopping: what was captured is written, {grace_s:.0f} s at most; Ctrl-C again ends at once"


def in_use_elsewhere(run: RunDir, where: str) -> RunInUseError:
    """The error for a run that waits or runs in a scheduler."""
    return RunInUseError(
        f"{run.root} is in use: {where}; wait for it, or quantexp cancel {run.root}"
    )


def carry_out(
    experiment: Experiment,
    folder: Opened,
    lock: int,
    on_poll: Callable[[], None],
    variables: Mapping[str, str] | None = None,
    on_stop: Callable[[float], None] = lambda _: None,
) -> None:
    """Run the attempt that is ready in a folder to its end, whatever that is; the folder then says how it ended.

    A KeyboardInterrupt, of the user or raised by `on_poll`, ends it as cancelled; another one gives it no more time.

    Args:
        experiment: what runs.
        folder: opened, and ready.
        lock: the folder's.
        on_poll: called several times a second.
        variables: of the workers' environment, beside this process's.
        on_stop: called when an interrupt has ended the wait, with the seconds that the workers have for their end.
    """
    launcher = experiment.launcher
    try:
        code = _start(launcher, folder, on_poll, lock, variables or {}, on_stop)
    except KeyboardInterrupt:
        finish_capture(folder.run.captured(experiment.capture.dir))
        interrupted(folder.run, launcher.num_processes)
    else:
        finish_capture(folder.run.captured(experiment.capture.dir))
        ended(folder.run, launcher.num_processes, code)


def _start(
    launcher: LauncherConfig,
    folder: Opened,
    update: Callable[[], None],
    lock: int,
    more: Mapping[str, str],
    on_stop: Callable[[float], None],
) -> int:
    """Start the worker or workers and wait for their end; the exit code."""
    from hydra_plugins.quantexp_launcher import local

    run, variables = folder.run, {**environment(folder.snapshot), **more}
    if launcher.num_processes == 1:
        return local.run_worker(
            run.root, run.rank_log(0), update, variables, keep_open=(lock,), on_stop=on_stop
        )

    def goes_on() -> bool:
        update()
        return not _overdue(run, launcher.timeout_min)

    return local.run_ranks(
        run.root,
        launcher.num_processes,
        launcher.num_threads,
        run.torchrun_log,
        goes_on,
        variables,
        keep_open=(lock,),
        on_stop=on_stop,
    )


def _overdue(run: RunDir, timeout_min: float) -> bool:
    """Whether rank 0 ended so long ago that another rank must hang."""
    status = read_status(run.status)
    if status is None or status.finished is None:
        return False
    return datetime.now(UTC) - datetime.fromisoformat(status.finished) > timedelta(
        minutes=timeout_min
    )


def outcome(
    experiment: Experiment, run: RunDir, skipped: str | None = None, elsewhere: str | None = None
) -> Outcome:
    """What a run folder says; `skipped` and `elsewhere` are as in `Opened`."""
    status, metrics = read_status(run.status), recent_metrics(run)
    if status is None:
        raise RunError(f"{run.root} has no status.json: it is no run folder, or was never started")
    return Outcome(
        experiment,
        run,
        status.state,
        skipped or elsewhere or status.reason,
        skipped is not None,
        metrics[-1] if metrics else None,
        speed_of(metrics),
        status.capture.get("tensors", 0),
        status.capture.get("num_bytes", 0),
        read_json(run.precision) if run.precision.exists() else None,
        status.tracking,
        _verified(run),
    )


def _verified(run: RunDir) -> str | None:
    """What provenance.json says of the verification of what ran; None where it does not."""
    if not run.provenance.exists():
        return None
    known = read_json(run.provenance).get("verified")
    return None if known is None else str(known["words"])
