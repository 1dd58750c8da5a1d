"""The submission before a new one: its folder, and the output of its tasks that did not finish.

A task is unfinished if a part of its group still has no partial result, whatever ended it: nobody asks SLURM, which may
have forgotten the task.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantexp.errors import RunError
from quantexp.launch.backend import DividedJobs
from quantexp.launch.divided_work import DividedWork
from quantexp.launch.submitted_work import Submitted
from quantexp.runs.paths import Submission
from quantexp_launchers.slurm.divided.plan import read_plan


def with_earlier(jobs: DividedJobs, before: Submitted | None, work: DividedWork) -> DividedJobs:
    """The jobs, with the submission of the same work before them, if its folder still exists."""
    if before is None or before.job != work.folder.job or not Path(before.folder).is_dir():
        return jobs
    folder = Path(before.folder)
    return replace(jobs, earlier=folder, unfinished=tuple(_unfinished(folder, work)))


def _unfinished(folder: Path, work: DividedWork) -> list[Path]:
    """The output of the unfinished tasks that started; of the last job, if all tasks finished."""
    try:
        groups = read_plan(Submission(folder)).groups
    except RunError:
        return []
    left = {part for group in work.groups() for part in group}
    tasks = [task for task, group in enumerate(groups) if not left.isdisjoint(group)]
    # %A_%a_0_log.err of a task, %j_0_log.err of a job
    patterns = [f"*_{task}_0_log.err" for task in tasks] or ["[0-9]*_0_log.err"]
    logs = (sorted(folder.glob(pattern)) for pattern in patterns)
    return [log for each in logs for log in each if tasks or log.name.count("_") == 2]
