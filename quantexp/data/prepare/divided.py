"""A preparation divided among jobs: its parts are the input files. See `quantexp.launch.divided_work`.

The tasks neither compose a configuration nor search for inputs, so files that appear meanwhile change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from quantexp.data.prepare.inputs import Input
from quantexp.data.prepare.job import Job, make_job
from quantexp.data.prepare.listing import unfinished
from quantexp.data.prepare.partial import PartialFolder, partial_folder
from quantexp.data.prepare.report import print_rejected, print_report
from quantexp.data.prepare.run import make_part, prepare
from quantexp.processes.groups import balanced
from quantexp.reading.json_files import require_json
from quantexp.schema.dataset import DatasetConfig
from quantexp.terminal.console import output_console

#: Seconds to wait for the submitter, or the processes of an earlier task, to leave the folder.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Content:
    """A preparation as its jobs read it."""

    dataset: DatasetConfig
    #: Whether another dataset at the prefix is replaced.
    force: bool
    inputs: list[Input]


@dataclass(frozen=True)
class DividedPreparation:
    """A preparation and its division."""

    job: Job
    content: Content
    verb: str = "prepare"
    parts: str = "input files"

    @property
    def num_parts(self) -> int:
        """The number of inputs."""
        return len(self.job.inputs)

    @property
    def folder(self) -> PartialFolder:
        """`PREFIX.partial`."""
        return partial_folder(self.job)

    @property
    def result(self) -> Path:
        """The prefix of the dataset."""
        return self.job.prefix

    def groups(self) -> list[list[int]]:
        """The inputs whose outputs do not all exist, in groups of about the same number of bytes."""
        if self.folder.is_complete():
            return []
        sizes = [item.num_bytes for item in self.job.inputs]
        return balanced(sizes, unfinished(self.folder, range(self.num_parts)))

    def begin(self) -> None:
        """Remove the outputs of another preparation, but not a complete result."""
        if not self.folder.is_complete():
            self.folder.begin()

    def make(self, group: Sequence[int], console: Console) -> None:
        """Make the outputs of the inputs of one task."""
        make_part(self.job, group, console, PATIENCE_S)

    def join(self, console: Console) -> int:
        """Run the ordinary preparation, which finds the outputs, and print its report."""
        prepared = prepare(self.job, console, force=self.content.force, patience_s=PATIENCE_S)
        console = output_console()
        print_report(prepared.prefix, prepared.card, console)
        print_rejected(prepared.prefix, prepared.card, console)
        return 0


def divided(job: Job, dataset: DatasetConfig, *, force: bool) -> DividedPreparation:
    """A preparation as work for jobs."""
    return DividedPreparation(job, Content(dataset, force, job.inputs))


def work_of(file: Path, num_cores: int) -> DividedPreparation:
    """The preparation that was submitted, with a process for each core unless the configuration has their number.

    Raises:
        UnreadableError: the file is damaged.
        DataError: the tokenizer cannot be read.
    """
    content = require_json(file, Content)
    job = make_job(content.dataset, content.inputs)
    workers = content.dataset.prepare.num_workers or num_cores
    return DividedPreparation(replace(job, num_workers=workers), content)
