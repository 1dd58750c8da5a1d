"""The folder of an unfinished preparation, `PREFIX.partial`: its files and its lock.

One process that prepares has the folder alone. Tasks of a cluster's job, each of which makes the outputs of some
inputs, share it, and exclude every other preparation at that prefix.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantexp.data.binary import partial_path
from quantexp.data.prepare.job import Job
from quantexp.data.prepare.shards import Shard
from quantexp.data.prepared import read_card
from quantexp.errors import DataError
from quantexp.runs.work_folder import WorkFolder


@dataclass(frozen=True)
class PartialFolder(WorkFolder):
    """The folder `PREFIX.partial` and the paths of its files."""

    def output(self, index: int, shard: Shard) -> Path:
        """The output of a shard of an input, counted from 0."""
        return self.outputs / f"{index:05}-{shard.start:013}-{shard.end:013}.npz"

    def listing(self, index: int) -> Path:
        """The list of an input's outputs, which exists once all of them do."""
        return self.outputs / f"{index:05}.json"

    @property
    def too_many_rejected(self) -> Path:
        """The list of unreadable records, kept for the user if there were too many."""
        return self.root / "too_many_rejected.jsonl"

    @property
    def result(self) -> Path:
        """The prefix of the result before it is moved into place; its card is written last."""
        return self.root / "result"

    def is_complete(self) -> bool:
        """Whether the result of this job is complete and being moved into place."""
        card = read_card(self.result)
        return card is not None and card.job == self.job

    def begin(self) -> None:
        """Removes everything but the outputs of this preparation, or nothing if the result is complete.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self.is_complete():
            super().begin()

    @contextmanager
    def shared(self, patience_s: float = 0.0) -> Iterator[None]:
        """Creates the folder and its outputs' and locks it together with other tasks of the job; the folder remains.

        Raises:
            DataError: it cannot be created, or a process has it alone for longer than `patience_s`.
        """
        with self.locked(fcntl.LOCK_SH, patience_s):
            with self.writing():
                self.outputs.mkdir(exist_ok=True)
            yield


def partial_folder(job: Job) -> PartialFolder:
    """Returns the folder of a job."""
    root = partial_path(job.prefix)
    return PartialFolder(root, job.hash, "prepares", "dataset.path", DataError)
