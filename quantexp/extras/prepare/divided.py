"""A preparation divided among jobs: its parts are the input files, and each job runs this module.

    python -m quantexp.extras.prepare.divided CONTENT 0 2     makes the outputs of two inputs, counted from 0
    python -m quantexp.extras.prepare.divided CONTENT         makes what is missing, joins all and prints the report

The jobs neither compose a configuration nor search for inputs, so files that appear meanwhile change nothing. Both
continue from the outputs that exist, so a killed, preempted or requeued task loses only those in progress.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.data.prepare.inputs import Input
from quantexp.data.prepare.job import Job, make_job
from quantexp.data.prepare.outputs import unfinished
from quantexp.data.prepare.partial import partial_folder
from quantexp.data.prepare.run import make_part, prepare
from quantexp.errors import DataError, QuantexpError
from quantexp.extras.prepare.report import print_rejected, print_report
from quantexp.reading.json_files import require_json
from quantexp.schema.dataset import DatasetConfig
from quantexp.terminal.console import complain, error_console, output_console

#: The largest number of tasks: below the usual limit of a SLURM array (1,001), and few enough to look through.
MAX_TASKS = 256
#: Seconds to wait for the submitter, or the processes of an earlier task, to leave the folder.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Content:
    """A preparation as its jobs read it."""

    dataset: DatasetConfig
    #: Whether another dataset at the prefix is replaced.
    force: bool
    inputs: list[Input]
    #: The hash of the job at submission.
    hash: str


def content_of(job: Job, dataset: DatasetConfig, *, force: bool) -> dict[str, Any]:
    """`Content` as JSON has it."""
    content = Content(dataset, force, job.inputs, job.hash)
    return asdict(content, dict_factory=_with_values)


def _with_values(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}


def groups_of(job: Job) -> list[list[int]]:
    """The inputs whose outputs do not all exist, in groups of about the same number of bytes."""
    folder = partial_folder(job)
    if folder.is_complete():
        return []
    sizes = [item.num_bytes for item in job.inputs]
    return balanced(sizes, unfinished(folder, range(len(sizes))))


def balanced(sizes: Sequence[int], among: Sequence[int], most: int = MAX_TASKS) -> list[list[int]]:
    """The pieces `among` in at most `most` groups of about the same size, none of them empty.

    The largest piece goes first, each to the group with the smallest size so far. A piece is never divided.

    Args:
        sizes: of all pieces, for instance in bytes; 0 where it is not known.
        among: the pieces to divide, as indices of `sizes`.
        most: the largest number of groups.
    """
    groups = [list[int]() for _ in range(min(max(1, most), len(among)))]
    loads = [(0, 0) for _ in groups]  # size, and pieces for those of unknown size
    for index in sorted(among, key=lambda index: -sizes[index]):
        lightest = loads.index(min(loads))
        size, number = loads[lightest]
        loads[lightest] = (size + sizes[index], number + 1)
        groups[lightest].append(index)
    return sorted(sorted(group) for group in groups)


def main(argv: Sequence[str]) -> int:
    """Make the outputs of some inputs, or finish the preparation; returns the exit code."""
    try:
        content = require_json(Path(argv[0]), Content)
        job = make_job(content.dataset, content.inputs)
        if job.hash != content.hash:
            raise DataError(
                f"the input of {job.prefix} has changed since the submission: run the same quantexp prepare again"
            )
        if len(argv) > 1:
            make_part(job, [int(index) for index in argv[1:]], error_console(), PATIENCE_S)
        else:
            _finish(job, force=content.force)
    except QuantexpError as error:
        complain(error.message, error.listed)
        return 1
    return 0


def _finish(job: Job, *, force: bool) -> None:
    """Run the ordinary preparation, which finds the outputs, and print its report."""
    prepared = prepare(job, error_console(), force=force, patience_s=PATIENCE_S)
    console = output_console()
    print_report(prepared.prefix, prepared.card, console)
    print_rejected(prepared.prefix, prepared.card, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
