"""The standing of runs on this machine: a run is alive while its lock is held, or while another machine has its claim.

A pending run waits if a live sweep lists it. The process to end in order to end a run is its worker, or the torchrun
that starts its workers: of those with the run's folder on their command line, the one that is no child of the others.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from quantexp.errors import UnreadableError
from quantexp.launch.backend import Standing, reread
from quantexp.launch.ledger.standing import mark_cancelled
from quantexp.runs.fencing import claimant, own_claim, read_claim
from quantexp.runs.lock import is_held, is_locked
from quantexp.runs.outcome import announce_kill
from quantexp.runs.paths import RunDir, RunsRoot, SweepFiles
from quantexp.runs.status import State, Status, end_of
from quantexp.runs.sweep_list import read_sweep

#: Part of the command line of a worker, and of the torchrun that starts workers.
WORKER = "quantexp.training.worker"
_UNFINISHED = (State.PENDING, State.RUNNING)
#: The reason of a pending run that is in no live sweep.
NOT_SCHEDULED = "prepared, but no process starts it; quantexp resume does"


def standings(runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
    """The standing of each run."""
    current = [_standing(run, status) for run, status in runs]
    pending = [s for s in current if s.state is State.PENDING and not s.alive]
    sweeps = {root: waiting_in(root) for root in {s.run.root.parent for s in pending}}

    def with_sweep(standing: Standing) -> Standing:
        if standing.state is not State.PENDING or standing.alive:
            return standing
        sweep = sweeps[standing.run.root.parent].get(standing.run.root.name)
        if sweep is None:
            return replace(standing, reason=standing.reason or NOT_SCHEDULED)
        return replace(standing, alive=True, where=f"waiting in sweep {sweep}")

    return [with_sweep(standing) for standing in current]


def _standing(run: RunDir, status: Status) -> Standing:
    while status.state in (State.PENDING, State.RUNNING):
        if is_locked(run) or claimant(run) is not None:
            return Standing(run, status.state, True, status.reason, _process(status), status=status)
        current = reread(run, status)  # the run may have started, ended or been prepared again
        if current == status:
            break
        status = current
    if status.state is not State.RUNNING:
        return Standing(run, status.state, False, status.reason, status=status)
    why = (
        f"died without recording why: process {status.pid} on {status.host} is gone (killed, or machine failure), "
        f"at iteration {status.iteration} of {status.iterations}"
    )
    state, reason = end_of(status, State.PREEMPTED, why)
    return Standing(run, state, False, reason, status=status)


def _process(status: Status) -> str:
    where = "here" if status.host == platform.node() else str(status.host)
    return f"{where}, process {status.pid}" if status.pid else f"{where}, starting"


def workers(runs: Sequence[RunDir]) -> dict[Path, psutil.Process]:
    """Run folder -> the process to end, for each run whose lock is held; one that this user cannot see is absent."""
    folders = {os.path.realpath(run.root): run.root for run in runs if is_locked(run)}
    processes: dict[Path, dict[int, psutil.Process]] = {}
    for process in psutil.process_iter(["cmdline", "ppid"]) if folders else ():
        words = process.info["cmdline"] or []
        for folder in folders.keys() & set(map(os.path.realpath, words if WORKER in words else ())):
            processes.setdefault(folders[folder], {})[process.pid] = process
    return {
        root: next(process for process in each.values() if process.info["ppid"] not in each)
        for root, each in processes.items()
    }


def _end(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process; SIGCONT lets it, and what it started, take it even if they were stopped.

    Raises:
        psutil.AccessDenied: it is another user's.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [process, *process.children(recursive=True)]
        for each in tree if number is signal.SIGKILL else tree[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)


def cancel(standings: Sequence[Standing]) -> dict[Path, str | None]:
    """Mark pending runs as cancelled, so that their sweep skips them; send SIGTERM to the workers of running ones.

    A run whose process is not visible, or is another user's, is left out.
    """
    answers: dict[Path, str | None] = {}
    for standing in standings:
        if standing.state is State.PENDING and not is_locked(standing.run):
            mark_cancelled(standing)
    for root, worker in workers([standing.run for standing in standings]).items():
        with contextlib.suppress(psutil.AccessDenied):
            _end(worker, signal.SIGTERM)
            answers[root] = None
    return answers


def kill(standings: Sequence[Standing], reason: str) -> None:
    """Kill the workers of runs, with everything that they started; the reason becomes that of the runs.

    The process that waits for a worker has the lock too, and records the end. It continues if it was stopped.
    """
    runs = [standing.run for standing in standings]
    for root, worker in workers(runs).items():
        announce_kill(RunDir(root), reason)
        with contextlib.suppress(psutil.AccessDenied):
            _end(worker, signal.SIGKILL)
    for claim in map(read_claim, runs):
        if claim is not None and claim.is_of(own_claim()):
            with contextlib.suppress(psutil.Error):
                psutil.Process(claim.pid).send_signal(signal.SIGCONT)


def waiting_in(root: Path) -> dict[str, str]:
    """Run name -> sweep name, for the unfinished runs of live sweeps."""
    sweeps = {}
    for file in sorted(RunsRoot(root).sweeps.glob("*.json")):
        if is_held(SweepFiles(file).lock):
            with contextlib.suppress(UnreadableError):  # written by another version, or damaged
                for row in read_sweep(file)["runs"]:
                    if row["run"] is not None and row.get("state") in _UNFINISHED:
                        sweeps[row["run"]] = file.stem
    return sweeps
