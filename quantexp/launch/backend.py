"""The launcher protocol: what the command line and the ledger need of a kind of machine.

`quantexp_launchers.local` and `quantexp_launchers.slurm` implement it, and so can any other package: it derives a class
from `Launcher` and names it in the entry point group `quantexp.launchers`. The entry point's name is the value of
`launcher.kind` that chooses it. `status.json` records that kind, so the ledger asks the launcher that started a run.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from quantexp.config.launchers import load_launcher, options_of
from quantexp.errors import ConfigError, RunError
from quantexp.launch.outcome import Pace
from quantexp.runs.paths import RunDir
from quantexp.runs.status import INTERRUPTED, State, Status, end_of, read_status
from quantexp.runs.work_folder import WorkFolder
from quantexp.schema import Experiment, LauncherConfig
from quantexp.schema.launcher import LOCAL

#: An experiment and its stage: runs of a stage start after all runs of the previous stage have completed.
Point = tuple[Experiment, int]
#: States in which a run's job or process may be alive.
OPEN = (State.PENDING, State.RUNNING, State.PREEMPTED)


@dataclass(frozen=True)
class Job:
    """The job of a run, as its launcher reports it."""

    id: str
    #: What it does: waiting (Resources), running on n1.
    activity: str = ""
    is_waiting: bool = False
    restarts: int = 0
    ended: datetime | None = None


@dataclass(frozen=True)
class Standing:
    """The actual state of a run."""

    run: RunDir
    #: None if the status is missing or broken.
    state: State | None
    #: Whether the run waits, runs, or will be requeued by the scheduler.
    alive: bool = False
    #: Why the run ended, or was requeued.
    reason: str = ""
    #: `here, process 123`, `job 123_4 running on n1`, `job 123_4 waiting (Resources)`; empty after the end.
    where: str = ""
    #: A warning about information that is not available.
    note: str | None = None
    #: The content of status.json.
    status: Status = field(default_factory=Status)
    job: Job | None = None
    pace: Pace = field(default_factory=Pace)
    #: False if the run may still be alive: this cluster does not know the jobs of another one.
    sure: bool = True
    #: What is wrong with a file of the run besides status.json.
    damage: str = ""

    @property
    def is_unrecorded_end(self) -> bool:
        """Whether the run has certainly ended with a state or reason that status.json does not have."""
        ended = self.state is not None and self.state not in (State.PENDING, State.RUNNING)
        recorded = (self.status.state, self.status.reason)
        return ended and self.sure and (self.state, self.reason) != recorded


@dataclass(frozen=True)
class LaunchPlan:
    """What a launcher would do with a run, for `quantexp plan`."""

    command: list[str]
    #: The script that is submitted, if there is one.
    script: str | None = None
    #: What each of the parallel runs has of this machine.
    slots: list[str] = field(default_factory=list)
    #: Why the machine is too small.
    missing: str | None = None


@dataclass(frozen=True)
class DividedWork:
    """Work beside training: parts, which jobs make in parallel, and a last job that joins them; or one job for all."""

    #: The verb of the command line; the names of submissions begin with it.
    verb: str
    #: The file or folder that the work makes, as messages name it.
    result: Path
    #: The record of submissions and their lock, with the hash of what decides the result.
    folder: WorkFolder
    #: The arguments of Python in the last job.
    command: Sequence[str]
    #: What a repeated command does: `it makes only what is missing`.
    again: str
    #: What is written to a file whose path follows `command`; None for no such argument.
    content: Any = None
    #: The parts without partial results, a group for each task; their numbers are the last arguments of its command.
    groups: Sequence[Sequence[int]] = ()
    #: What the parts are, `input files`, and the number of all.
    parts: str = ""
    num_parts: int = 0


@dataclass(frozen=True)
class DividedJobs:
    """The jobs that do divided work, and how to follow and stop them."""

    work: DividedWork
    #: Live jobs if they were submitted before, else the new ones.
    jobs: list[Job]
    #: What was submitted, in words; empty if the jobs were submitted before.
    submitted: list[str]
    #: The folder of the scripts and of the jobs' output.
    folder: Path
    #: Shell commands.
    follow: list[str]
    stop: str
    #: The folder of the submission before this one, whose jobs did not complete the work.
    earlier: Path | None = None
    #: The output of those of its tasks that did not finish.
    unfinished: tuple[Path, ...] = ()


@dataclass
class NoOptions:
    """The options of a launcher without any."""


class Launcher(ABC):
    """Starts runs on one kind of machine, and reports their state."""

    #: The dataclass of `launcher.options`; `options_of` converts them to it.
    options: type[Any] = NoOptions

    def check(self, launcher: LauncherConfig) -> None:
        """Refuse a configuration that this kind cannot serve; here, options that the dataclass does not have.

        Raises:
            ConfigError: names the key.
        """
        options_of(launcher, self.options)

    @abstractmethod
    def submit(self, points: Sequence[Point], console: Console, *, is_sweep: bool) -> int:
        """Start the runs, wait for them or not, and print the result; returns the command's exit code.

        `quantexp.launch.attempt.open_run` opens the folder of a run and says whether it needs to run.

        Raises:
            QuantexpError: the runs cannot start.
        """

    @abstractmethod
    def standings(self, runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
        """The actual state of each run of this kind that has not completed; with `note` if it cannot be known."""

    @abstractmethod
    def cancel(self, standings: Sequence[Standing]) -> dict[Path, str | None]:
        """Make runs end, without waiting for it.

        Returns:
            For each run folder None, or why its run cannot be cancelled. A run that is left out is tried again soon.
        """

    def kill(self, standings: Sequence[Standing], reason: str) -> None:  # noqa: B027
        """Kill runs that did not end in time after `cancel`; here nothing: clusters do it themselves."""

    def logs(self, standing: Standing) -> list[Path]:
        """The files that hold a run's output before its ranks open their own logs."""
        return []

    def live_job(self, run: RunDir, status: Status) -> str | None:
        """A text such as `job 12 is waiting` if a job of the run is alive; None otherwise.

        Raises:
            RunError: the scheduler does not answer.
        """
        (standing,) = self.standings([(run, status)])
        if standing.note is not None:
            raise RunError(standing.note)
        job = standing.job
        return f"job {job.id} is {job.activity}" if standing.alive and job is not None else None

    def divide(self, work: DividedWork, experiment: Experiment, console: Console) -> DividedJobs:
        """Submit work beside training as jobs, unless its jobs are alive; here, refuse it.

        Two or more groups are a task each, and a last job after all of them succeeded; else there is only the last job.
        `quantexp.launch.divided_work` keeps the record. Of the experiment only `launcher` and `paths.root` matter.

        Raises:
            QuantexpError: the jobs cannot be submitted.
        """
        raise ConfigError(
            f"launcher.kind={experiment.launcher.kind} cannot run quantexp {work.verb}; drop it to run that on this "
            "machine"
        )

    def jobs_named(self, name: str) -> list[Job]:
        """The live jobs of the submission of divided work with this name.

        Raises:
            RunError: the scheduler does not answer.
        """
        return []

    def plan(self, experiment: Experiment, folder: Path) -> LaunchPlan:
        """What this launcher would do with an experiment whose run folder is `folder`."""
        return LaunchPlan([sys.executable, "-m", "quantexp.training.worker", str(folder)])


def launcher_of(kind: str) -> Launcher:
    """The launcher of a kind.

    Raises:
        ConfigError: no installed package has it.
    """
    return cast(Launcher, load_launcher(kind))


def kind_of(status: Status) -> str:
    """The kind of the launcher that started a run; local if status.json was lost meanwhile."""
    return status.launcher or LOCAL


def live_job(run: RunDir, status: Status) -> str | None:
    """A text such as `job 12 is waiting` if a job of the run is alive; None otherwise.

    Raises:
        RunError: the scheduler does not answer.
        ConfigError: the run's launcher is not installed here.
    """
    return launcher_of(kind_of(status)).live_job(run, status)


def has_recorded_end(status: Status) -> bool:
    """Whether a run has recorded its final end; after a signal, only the scheduler of a job knows the cause."""
    by_signal = status.state is State.CANCELLED and status.reason == INTERRUPTED
    return status.state not in OPEN and not by_signal


def reread(run: RunDir, status: Status) -> Status:
    """The status now: the run may have ended since it was read."""
    try:
        return read_status(run.status) or status
    except RunError:
        return status


def ended(run: RunDir, status: Status, reason: str) -> Standing:
    """The standing of a run that no process and no job executes: what it recorded, or else preempted with a reason."""
    status = reread(run, status)
    if status.state in (State.PENDING, State.RUNNING):
        where = f"{reason}, at iteration {status.iteration} of {status.iterations}"
        state, words = end_of(status, State.PREEMPTED, where)
        return Standing(run, state, False, words, status=status)
    return Standing(run, status.state, False, status.reason, status=status)
