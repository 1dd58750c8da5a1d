"""The plan of a preparation: everything that its tasks know, written at submission to `preparation.json`.

The tasks neither compose a configuration nor search for inputs, so files that appear meanwhile change nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.data.prepare.inputs import Input
from quantexp.data.prepare.job import Job, make_job
from quantexp.errors import DataError
from quantexp.reading.json_files import require_json
from quantexp.runs.paths import Submission
from quantexp.runs.status import write_json
from quantexp.schema import DatasetConfig


@dataclass(frozen=True)
class Plan:
    """A preparation, and its division into tasks."""

    dataset: DatasetConfig
    #: Whether another dataset at the prefix is replaced.
    force: bool
    inputs: list[Input]
    #: For each task the inputs whose outputs it makes, counted from 0.
    groups: list[list[int]]
    #: The hash of the preparation.
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


def write_plan(plan: Plan, submission: Submission) -> None:
    """Write the plan to a private file.

    Raises:
        OSError: it cannot be written.
    """
    write_json(submission.preparation, asdict(plan, dict_factory=_with_values))
    submission.preparation.chmod(0o600)


def read_plan(submission: Submission) -> Plan:
    """The plan of a submission.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(submission.preparation, Plan)


def planned_job(plan: Plan, num_cores: int) -> Job:
    """The preparation, as it was submitted, with a process for each core unless the configuration has their number.

    Raises:
        DataError: the input or the tokenizer has changed since the submission.
    """
    job = make_job(plan.dataset, plan.inputs)
    if job.hash != plan.job:
        raise DataError(
            f"an input or the tokenizer of {job.prefix} has changed since the submission: run the "
            "same quantexp prepare again"
        )
    workers = plan.dataset.prepare.num_workers or plan.cpus_per_process or num_cores
    return replace(job, num_workers=workers)


def submitted_from() -> str:
    """The working directory."""
    return str(Path.cwd())


def _with_values(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}
