"""The plan of divided work: everything that its tasks know, written at submission to `plan.json` and `work.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.errors import RunError
from quantexp.launch.divided_work import DividedWork, load_work
from quantexp.reading.json_files import require_json
from quantexp.runs.paths import Submission
from quantexp.runs.status import write_json


@dataclass(frozen=True)
class Plan:
    """The division of work into tasks; `work.json` has the work itself."""

    verb: str
    #: For each task the parts that it makes, counted from 0; empty for a single job.
    groups: list[list[int]]
    #: The hash of the work.
    job: str
    #: The submitter's working directory, which relative paths begin at.
    directory: str
    #: The source snapshot.
    snapshot: str
    #: The submitter's umask.
    umask: int
    #: As configured: how often SLURM may start a task again, and the cores of a task.
    max_requeue: int
    cpus_per_process: int | None


def write_plan(plan: Plan, work: DividedWork, submission: Submission) -> None:
    """Write the plan and the work to private files.

    Raises:
        OSError: they cannot be written.
    """
    for file, content in ((submission.plan, plan), (submission.work, work.content)):
        write_json(file, asdict(content, dict_factory=_with_values))
        file.chmod(0o600)


def read_plan(submission: Submission) -> Plan:
    """The plan of a submission.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(submission.plan, Plan)


def planned_work(plan: Plan, submission: Submission, num_cores: int) -> DividedWork:
    """The work, as it was submitted.

    Raises:
        RunError: what it is made of has changed since the submission.
        QuantexpError: `work.json` or the input cannot be read.
    """
    work = load_work(plan.verb, submission.work, plan.cpus_per_process or num_cores)
    if work.folder.job != plan.job:
        raise RunError(
            f"the input of {work.result} has changed since the submission: run the same quantexp {plan.verb} again"
        )
    return work


def submitted_from() -> str:
    """The working directory."""
    return str(Path.cwd())


def _with_values(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}
