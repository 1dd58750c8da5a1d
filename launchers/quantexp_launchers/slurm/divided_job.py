"""A job of work beside training on its node: `python -m quantexp_launchers.slurm.divided_job SUBMISSION`.

It becomes the command of its task or, outside of an array, that of the last job, in the directory and with the umask of
the submitter.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from quantexp.errors import QuantexpError, RunError
from quantexp.processes.machine import CORES
from quantexp.reading.json_files import require_json
from quantexp.runs.paths import Submission
from quantexp.runs.snapshot import check_snapshot
from quantexp.terminal.console import complain


@dataclass(frozen=True)
class Plan:
    """Everything that the jobs know, written at submission to `plan.json`."""

    verb: str
    #: The arguments of Python in the last job; in a task, the numbers of its parts follow them.
    command: list[str]
    #: For each task the parts that it makes, counted from 0; empty for a single job.
    groups: list[list[int]]
    #: What a repeated command does.
    again: str
    #: The submitter's working directory, which relative paths begin at.
    directory: str
    #: The source snapshot.
    snapshot: str
    #: The submitter's umask.
    umask: int
    #: As configured: how often SLURM may start a job again, and the cores of a job.
    max_requeue: int
    cpus_per_process: int | None


def read_plan(submission: Submission) -> Plan:
    """The plan of a submission.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(submission.plan, Plan)


def main(argv: Sequence[str]) -> NoReturn:
    """Become the command of this job, or exit with 1 if that cannot be."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the warning before the time limit
    try:
        plan = read_plan(Submission(Path(argv[0])))
        command = _begin(plan, os.environ)
    except QuantexpError as error:
        complain(error.message, error.listed)
        sys.exit(1)
    os.environ[CORES] = str(plan.cpus_per_process or os.environ.get("SLURM_CPUS_ON_NODE", 1))
    os.execv(sys.executable, [sys.executable, "-u", *command])


def _begin(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Take the place of the submitter; returns the arguments of Python."""
    os.umask(plan.umask)
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    if restarts > plan.max_requeue:
        raise RunError(
            f"SLURM has started this task again {restarts} times, more than launcher.max_requeue={plan.max_requeue}; "
            f"run the same quantexp {plan.verb} again: {plan.again}"
        )
    check_snapshot(Path(plan.snapshot))
    try:
        os.chdir(plan.directory)
    except OSError as error:
        raise RunError(
            f"{plan.directory}, where the command was typed, cannot be entered on this node: {error.strerror}; "
            "submit it from a folder that all nodes have"
        ) from error
    task = environment.get("SLURM_ARRAY_TASK_ID")
    return plan.command if task is None else [*plan.command, *map(str, plan.groups[int(task)])]


if __name__ == "__main__":
    main(sys.argv[1:])
