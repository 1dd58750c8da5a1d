"""A job of divided work on its node: `python -m quantexp_launchers.slurm.divided.job make|join SUBMISSION`.

`make` makes the partial results of one task, `join` joins those of all. Both continue from the partial results that
exist, so a killed, preempted or requeued task loses only those in progress.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from quantexp.errors import QuantexpError, RunError
from quantexp.runs.paths import Submission
from quantexp.runs.snapshot import check_snapshot
from quantexp.terminal.console import error_console
from quantexp.training.log import LOG, log_to_stderr
from quantexp_launchers.slurm.divided.plan import planned_work, read_plan


def main(argv: list[str] | None = None) -> int:
    """Run `make` or `join` and return the exit code."""
    step, folder = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the warning before the time limit
    with log_to_stderr(step):
        try:
            return _run(step, Submission(Path(folder)), os.environ)
        except QuantexpError as error:
            LOG.error(error)
            return 1


def _run(step: str, submission: Submission, environment: Mapping[str, str]) -> int:
    plan = read_plan(submission)
    os.umask(plan.umask)
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    if restarts > plan.max_requeue:
        raise RunError(
            f"SLURM has started this task again {restarts} times, more than launcher.max_requeue={plan.max_requeue}; "
            f"run the same quantexp {plan.verb} again, it resumes where this one stopped"
        )
    check_snapshot(Path(plan.snapshot))
    _enter(plan.directory)
    work = planned_work(plan, submission, int(environment.get("SLURM_CPUS_ON_NODE", "1")))
    if step == "join":
        return work.join(error_console())
    work.make(plan.groups[int(environment["SLURM_ARRAY_TASK_ID"])], error_console())
    return 0


def _enter(directory: str) -> None:
    """Work where the command was typed, so that relative paths mean the same.

    Raises:
        RunError: this node does not have the folder.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise RunError(
            f"{directory}, where the command was typed, cannot be entered on this node: {error.strerror}; "
            "submit it from a folder that all nodes have"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
