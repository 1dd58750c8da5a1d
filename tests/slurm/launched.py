"""Tiny runs under a real SLURM: how tests submit and watch them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quantexp_launchers.slurm.submit import send
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status
from quantexp.schema import Experiment

from .cluster import Cluster

#: A run that goes on until something ends it.
ENDLESS = ["training.iterations=1000000", "capture=off"]
#: The request of every job here.
SMALL = ["launcher=slurm", "launcher.cpus_per_process=1", "launcher.time_min=30"]
#: Submits a job that starts only after `scontrol release`.
HELD = "+launcher.sbatch.hold=true"
#: Time limit of a start: Python, torch, Megatron-Core and the first iterations, on shared cores.
START_S = 90.0

_Value = TypeVar("_Value")


def submitted(
    tiny_words: list[str], root: Path, *points: list[str]
) -> tuple[list[RunDir], list[str]]:
    """Submit tiny runs together; returns their folders and the ids of their jobs."""
    common = [*tiny_words, *SMALL, f"paths.root={root}"]
    experiments: list[tuple[Experiment, int]] = [
        (compose([*common, *words], None, {}), 0) for words in points
    ]
    sent, _ = send(experiments, Console(quiet=True))
    return [one.run for one in sent], [str(one.job_id) for one in sent]


def status_of(run: RunDir) -> Status:
    """The content of the run's status.json."""
    status = read_status(run.status)
    assert status is not None
    return status


def until(what: str, look: Callable[[], _Value], within_s: float = START_S) -> _Value:
    """Call `look` until it returns something true, and return that; fail after `within_s`."""
    end = time.monotonic() + within_s
    while not (value := look()):
        assert time.monotonic() < end, f"not {what} after {within_s} s"
        time.sleep(0.1)
    return value


def until_state(run: RunDir, *states: State, within_s: float = START_S) -> Status:
    """Wait until the run is in one of these states; returns its status."""
    words = " or ".join(states)
    until(f"{words} in {run.root}", lambda: status_of(run).state in states, within_s)
    return status_of(run)


def start_again(cluster: Cluster, job_id: str) -> None:
    """Let a requeued job start now, once its nodes have ended its last start: they refuse a second one."""
    until(f"the end of job {job_id}'s steps", lambda: not _steps(cluster, job_id), 30)
    cluster.start_now(job_id)


def _steps(cluster: Cluster, job_id: str) -> list[Path]:
    """The processes of this cluster that manage the job's steps."""
    conf, name = f"SLURM_CONF={cluster.slurm_conf}".encode(), f"[{job_id}.".encode()
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            managers = b"slurmstepd: " in (words := (process / "cmdline").read_bytes())
            if managers and name in words and conf in (process / "environ").read_bytes():
                processes.append(process)
    return processes


def until_training(run: RunDir, starts_before: int = 0) -> Status:
    """Wait until the run has finished a new iteration after `starts_before` restarts; returns its status."""

    def trains() -> bool:
        status = status_of(run)
        again = len(status.restarts) == starts_before
        reached = status.iteration > (status.goes_on_from or 0)
        return again and status.state is State.RUNNING and reached

    try:
        until(f"training in {run.root}", trains)
    except AssertionError as error:
        raise AssertionError(f"{error}: {status_of(run)}") from error
    return status_of(run)
