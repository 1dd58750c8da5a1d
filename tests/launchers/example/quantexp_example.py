"""A launcher in a package of its own: its jobs are background processes.

A real one queries its scheduler, this one the kernel: a job is a session of processes, and its id is the first one's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from quantexp.config.launchers import options_of
from quantexp.errors import ConfigError
from quantexp.launch.attempt import open_run
from quantexp.launch.backend import Job, Launcher, Point, Standing, ended
from quantexp.runs.device import device_class
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import command_line
from quantexp.runs.snapshot import environment
from quantexp.runs.status import State, Status, read_status, write_status
from quantexp.schema import LauncherConfig

_JOB = 'setsid sh -c "$1" > "$2" 2>&1 < /dev/null & echo $!'


@dataclass
class ExampleOptions:
    """The keys of `launcher.options`."""

    #: A shell command before the worker.
    before: str = "true"
    priority: int = 0


class ExampleLauncher(Launcher):
    options = ExampleOptions

    def check(self, launcher: LauncherConfig) -> None:
        super().check(launcher)
        if launcher.num_processes != 1:
            raise ConfigError("launcher.kind=example runs one process, got more")

    def submit(self, points: Sequence[Point], console: Console, *, is_sweep: bool) -> int:
        if len({stage for _, stage in points}) > 1:
            raise ConfigError("launcher.kind=example has no stages; drop sweep.first")
        for experiment, _ in points:
            device = device_class(experiment.launcher)
            with open_run(experiment, device, command_line()) as (folder, _):
                if not folder.ready:
                    console.print(f"{folder.run.root.name}: {folder.skipped or folder.elsewhere}")
                    continue
                options = options_of(experiment.launcher, ExampleOptions)
                job_id = self._start(folder.run, options.before, environment(folder.snapshot))
                status = read_status(folder.run.status)
                assert status is not None
                status.job_id = job_id
                write_status(folder.run.status, status)
                console.print(f"job {job_id}: {folder.run.root.name}")
        return 0

    def _start(self, run: RunDir, before: str, variables: dict[str, str]) -> str:
        worker = f"exec {sys.executable} -m quantexp.training.worker '{run.root}' --in-job"
        words = ["sh", "-c", _JOB, "job", f"{before} && {worker}", str(run.logs / "job.log")]
        output = subprocess.check_output(words, text=True, env={**os.environ, **variables})
        return output.strip()

    def standings(self, runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
        return [self._standing(run, status) for run, status in runs]

    def _standing(self, run: RunDir, status: Status) -> Standing:
        if status.job_id is None or not _is_alive(int(status.job_id)):
            return ended(run, status, f"job {status.job_id} is gone")
        job = Job(status.job_id, "running")
        where = f"job {job.id} running"
        return Standing(run, State.RUNNING, True, where=where, status=status, job=job)

    def cancel(self, standings: Sequence[Standing]) -> dict[Path, str | None]:
        answers: dict[Path, str | None] = {}
        for standing in standings:
            if standing.job is None:
                answers[standing.run.root] = "it has no job"
            else:
                os.killpg(int(standing.job.id), signal.SIGTERM)
                answers[standing.run.root] = None
        return answers

    def logs(self, standing: Standing) -> list[Path]:
        return [standing.run.logs / "job.log"]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
