"""One experiment, from its configuration to its outcome: open the folder, run the worker, read what it left."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.errors import RunError
from quantexp.paths import RunDir
from quantexp.progress import last_metrics, live_line
from quantexp.record import command_line, opened, read_json
from quantexp.schema import Experiment
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
    from hydra_plugins.quantexp_launcher.local import run_worker

    with opened(experiment, device_class(), command_line()) as (folder, lock):
        if folder.notice is not None:
            console.print(folder.notice, soft_wrap=True)
        if folder.skipped is None:
            names = [experiment.model.name, experiment.dataset.name, str(experiment.quant.name)]
            log = folder.run.rank_log(0)
            try:
                with live_line(folder.run, names, console) as update:
                    code = run_worker(folder.run.root, log, update, keep_open=(lock,))
            except KeyboardInterrupt:
                _account_for_death(folder.run, State.CANCELLED, "interrupted")
            else:
                _account_for_death(folder.run, State.FAILED, _without_a_word(code, log))
        return outcome(experiment, folder.run, folder.skipped)


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


def _account_for_death(run: RunDir, state: State, reason: str) -> None:
    """Write the end of a worker that could not write it itself; one that did keeps its own."""
    status = read_status(run.status) or Status(created=now())
    if status.state in (State.RUNNING, State.PENDING):
        status.state, status.reason, status.finished = state, reason, now()
        status.phase = ""
        run.reserve.unlink(missing_ok=True)
        write_status(run.status, status)


def _without_a_word(code: int, log: Path) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and no reason; see {log}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}; see {log}"
