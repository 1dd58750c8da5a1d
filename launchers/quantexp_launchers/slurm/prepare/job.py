"""A job of a preparation on its node: `python -m quantexp_launchers.slurm.prepare.job make|join SUBMISSION`.

`make` makes the outputs of the inputs of one task, `join` runs the ordinary preparation, which finds them. Both
continue from the outputs that exist, so a killed, preempted or requeued task loses only the shards in progress.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from quantexp.data.prepare.report import print_report
from quantexp.data.prepare.run import make_part, prepare
from quantexp.errors import QuantexpError, RunError
from quantexp.runs.paths import Submission
from quantexp.runs.snapshot import check_snapshot
from quantexp.terminal.console import error_console, output_console
from quantexp.training.log import LOG, log_to_stderr
from quantexp_launchers.slurm.prepare.plan import planned_job, read_plan

#: Seconds to wait for the submitter, or the processes of an earlier task, to leave the folder.
PATIENCE_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Run `make` or `join` and return the exit code."""
    verb, folder = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the warning before the time limit
    with log_to_stderr(f"prepare {verb}"):
        try:
            _run(verb, Submission(Path(folder)), os.environ)
        except QuantexpError as error:
            LOG.error(error)
            return 1
    return 0


def _run(verb: str, submission: Submission, environment: Mapping[str, str]) -> None:
    plan = read_plan(submission)
    os.umask(plan.umask)
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    if restarts > plan.max_requeue:
        raise RunError(
            f"SLURM has started this task again {restarts} times, more than launcher.max_requeue={plan.max_requeue}; "
            "run the same quantexp prepare again, it resumes where this one stopped"
        )
    check_snapshot(Path(plan.snapshot))
    _enter(plan.directory)
    job = planned_job(plan, int(environment.get("SLURM_CPUS_ON_NODE", "1")))
    if verb == "make":
        group = plan.groups[int(environment["SLURM_ARRAY_TASK_ID"])]
        make_part(job, group, error_console(), PATIENCE_S)
        return
    prepared = prepare(job, error_console(), force=plan.force, patience_s=PATIENCE_S)
    print_report(prepared.prefix, prepared.card, output_console())


def _enter(directory: str) -> None:
    """Work where the command was typed, so that relative paths mean the same.

    Raises:
        RunError: this node does not have the folder.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise RunError(
            f"{directory}, where the preparation was submitted, cannot be entered on this node: {error.strerror}; "
            "submit it from a folder that all nodes have"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
