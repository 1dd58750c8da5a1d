"""The standing of runs on this machine: a run is alive while its lock is held.

On disks without visible locks it is alive while its process exists. A pending run waits if a live sweep lists it.
"""

from __future__ import annotations

import contextlib
import platform
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from quantexp.errors import UnreadableError
from quantexp.launch.backend import Standing, reread
from quantexp.launch.ledger.settle import mark_cancelled
from quantexp.runs.claim import is_claimed
from quantexp.runs.lock import is_held, is_locked
from quantexp.runs.outcome import announce_kill
from quantexp.runs.paths import RunDir, RunsRoot, SweepFiles
from quantexp.runs.status import State, Status, end_of, instant
from quantexp.runs.sweep_list import read_sweep
from quantexp_launchers.local.owner import is_worker, taker, workers

#: How old the status of a live run on another machine, whose locks may be invisible here, may be.
SILENCE = timedelta(minutes=15)
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
        if is_locked(run) or is_claimed(run) or _may_live(status):
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


def _may_live(status: Status) -> bool:
    """Whether a run without a visible lock may still run: not every disk shows locks of other machines."""
    if status.state is not State.RUNNING:
        return False
    if status.host == platform.node():
        return status.pid is not None and is_worker(status.pid)
    if status.updated is None:
        return False
    return datetime.now(UTC) - instant(status.updated) < SILENCE


def _process(status: Status) -> str:
    where = "here" if status.host == platform.node() else str(status.host)
    return f"{where}, process {status.pid}" if status.pid else f"{where}, starting"


def cancel(standings: Sequence[Standing]) -> dict[Path, str | None]:
    """Mark pending runs as cancelled, so that their sweep skips them; send SIGTERM to the workers of running ones.

    A process receives the signal only if it holds the run's lock. SIGCONT follows, because a stopped process handles no
    other signal. A run whose process is not visible is left out.
    """
    answers: dict[Path, str | None] = {}
    for standing in standings:
        if standing.state is State.PENDING and not is_locked(standing.run):
            mark_cancelled(standing)
    processes = workers([standing.run.lock for standing in standings])
    for standing in standings:
        if standing.run.lock in processes:
            try:
                worker = processes[standing.run.lock]
                worker.terminate()
                for process in (worker, *worker.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                pass
            except psutil.AccessDenied:
                continue
            answers[standing.run.root] = None
    return answers


def kill(standings: Sequence[Standing], reason: str) -> None:
    """Kill the workers of runs, with everything that they started; the reason becomes that of the runs.

    The process that waits for a worker holds the lock too, and records the end. It continues if it was stopped.
    """
    processes = workers([standing.run.lock for standing in standings])
    for standing in standings:
        worker = processes.get(standing.run.lock)
        if worker is not None:
            announce_kill(standing.run, reason)
            with contextlib.suppress(psutil.Error):
                tree = [worker, *worker.children(recursive=True)]
                for process in tree:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        if (holder := taker(standing.run.lock)) is not None:
            with contextlib.suppress(psutil.Error):
                holder.send_signal(signal.SIGCONT)


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
