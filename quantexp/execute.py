"""One experiment, from its configuration to its outcome: open the folder, run the worker, read what it left."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.capture.manifest import join_parts
from quantexp.errors import RunError
from quantexp.paths import RunDir
from quantexp.progress import last_metrics, live_line
from quantexp.ranks import account
from quantexp.record import command_line, opened, read_json
from quantexp.schema import Experiment, LauncherConfig
from quantexp.status import State, Status, now, read_status, write_status


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
    #: Tensors captured, and their bytes.
    tensors: int = 0
    num_bytes: int = 0
    #: precision.json, where the proof got that far.
    precision: dict[str, Any] | None = None


def device_class() -> str:
    """`cpu`, or the GPU's name: part of a run's identity."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def execute(experiment: Experiment, console: Console) -> Outcome:
    """Run an experiment on this machine, with a live line, unless it is completed already.

    An interrupt (Ctrl-C) ends the worker and gives an outcome whose state is cancelled.

    Raises:
        RunError, DataError: it cannot start.
    """
    _check_devices(experiment.launcher)
    with opened(experiment, device_class(), command_line()) as (folder, lock):
        if folder.notice is not None:
            console.print(folder.notice, soft_wrap=True)
        if folder.skipped is None:
            names = [experiment.model.name, experiment.dataset.name, str(experiment.quant.name)]
            launcher = experiment.launcher
            try:
                with live_line(folder.run, names, console) as update:
                    code = _start(launcher, folder.run, update, lock)
            except KeyboardInterrupt:
                _join_capture(experiment, folder.run)
                _interrupted(folder.run, launcher.num_processes)
            else:
                _join_capture(experiment, folder.run)
                _ended(launcher, folder.run, code)
        return outcome(experiment, folder.run, folder.skipped)


def _check_devices(launcher: LauncherConfig) -> None:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if gpus is not None and launcher.num_processes > gpus:
        raise RunError(
            f"launcher.num_processes={launcher.num_processes} needs a GPU for each process, and this machine has {gpus}"
        )


def _start(launcher: LauncherConfig, run: RunDir, update: Callable[[], None], lock: int) -> int:
    """Start the worker or workers and wait for their end; the exit code."""
    from hydra_plugins.quantexp_launcher import local

    if launcher.num_processes == 1:
        return local.run_worker(run.root, run.rank_log(0), update, keep_open=(lock,))

    def goes_on() -> bool:
        update()
        return not _overdue(run, launcher.timeout_min)

    return local.run_ranks(
        run.root,
        launcher.num_processes,
        launcher.num_threads,
        run.torchrun_log,
        goes_on,
        keep_open=(lock,),
    )


def _overdue(run: RunDir, timeout_min: float) -> bool:
    """Whether rank 0 ended so long ago that another rank must hang."""
    status = read_status(run.status)
    if status is None or status.finished is None:
        return False
    return datetime.now(UTC) - datetime.fromisoformat(status.finished) > timedelta(
        minutes=timeout_min
    )


def _join_capture(experiment: Experiment, run: RunDir) -> None:
    """Ranks that did not end well left their lists of captured tensors apart."""
    if experiment.launcher.num_processes > 1:
        join_parts(run.captured(experiment.capture.dir))


def outcome(experiment: Experiment, run: RunDir, skipped: str | None = None) -> Outcome:
    """What a finished run folder says."""
    status = read_status(run.status)
    if status is None:
        raise RunError(f"{run.root} has no status.json: it is no run folder, or was never started")
    return Outcome(
        experiment,
        run,
        status.state,
        skipped or status.reason,
        skipped is not None,
        last_metrics(run),
        status.capture.get("tensors", 0),
        status.capture.get("num_bytes", 0),
        read_json(run.precision) if run.precision.exists() else None,
    )


def _conclude(run: RunDir, state: State, reason: str) -> None:
    """Say how a run ended that could not say so itself, or only what one rank saw of it."""
    status = read_status(run.status) or Status(created=now())
    status.state, status.reason, status.phase, status.finished = state, reason, "", now()
    run.reserve.unlink(missing_ok=True)
    write_status(run.status, status)


def _interrupted(run: RunDir, num_processes: int) -> None:
    """Cancelled, unless it was over already. Of several ranks, one may have "failed" only because others were ended."""
    status = read_status(run.status)
    over = {State.COMPLETED, State.CANCELLED} | ({State.FAILED} if num_processes == 1 else set())
    if status is None or status.state not in over:
        _conclude(run, State.CANCELLED, "interrupted")


def _ended(launcher: LauncherConfig, run: RunDir, code: int) -> None:
    """A worker that was killed could not say so itself; of several, the one that ended first is the reason."""
    if launcher.num_processes > 1:
        if code:
            _conclude(run, *account(run, launcher.num_processes))
        return
    status = read_status(run.status)
    if status is None or status.state in (State.RUNNING, State.PENDING):
        _conclude(run, State.FAILED, _without_a_word(code, run.rank_log(0)))


def _without_a_word(code: int, log: Path) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and no reason; see {log}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}; see {log}"
